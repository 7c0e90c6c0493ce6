"""Answers that must fit a schema or a pattern: what comes from a model of random weights is held against both."""

import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from huggingface_hub import InferenceClient

from tests.server.live import Live

CHAT: Any = [{"role": "user", "content": "Where is block 7?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"enum": ["free", "cached", "held"]},
        "block": {"type": "integer", "minimum": 0, "maximum": 999},
        "owner": {"type": "string", "pattern": "^[a-z]{2,6}-[0-9]{2}$"},
    },
    "required": ["place", "block", "owner"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server: Live, http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def hub(server: Live, http: httpx.Client) -> InferenceClient:
    return InferenceClient(server.url)


def test_openai_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="octavo", messages=CHAT, n=2, seed=1, max_tokens=400,
        response_format={"type": "json_schema", "json_schema": {"name": "where", "schema": SCHEMA, "strict": True}},
    )  # fmt: skip
    assert len({choice.message.content for choice in answer.choices}) == 2
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_hub_grammar(hub: InferenceClient) -> None:
    text = hub.text_generation("A", grammar={"type": "json", "value": SCHEMA}, max_new_tokens=400, do_sample=True)
    jsonschema.validate(json.loads(text.removeprefix("A")), SCHEMA)
    pattern = r"\d{1,3}(\.\d{1,3}){3}"
    text = hub.text_generation("A", grammar={"type": "regex", "value": pattern}, max_new_tokens=40, do_sample=True)
    assert re.fullmatch(pattern, text.removeprefix("A"))


TOOLS: Any = [
    {"type": "function", "function": {"name": "find", "description": "Find a block.", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "evict",
            "parameters": {
                "type": "object",
                "properties": {
                    "blocks": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0, "maximum": 99},
                        "maxItems": 3,
                    }
                },
                "required": ["blocks"],
                "additionalProperties": False,
            },
        },
    },
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def check_call(call: Any) -> None:
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "evict"}}, "evict"])
def test_openai_tools(client: openai.OpenAI, choice: Any) -> None:
    ask: Any = {
        "model": "octavo", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "n": 2, "seed": 4, "extra_body": {"tool_prompt": "Call:"},
        "max_tokens": 300, "parallel_tool_calls": False,
    }  # fmt: skip
    answer = client.chat.completions.create(**ask)
    calls = []
    for one in answer.choices:
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
        (call,) = one.message.tool_calls or []
        check_call(call)
        calls.append(call)
    assert len({call.id for call in calls}) == 2
    if choice != "required":
        assert {call.function.name for call in calls} == {"evict"}
    assert streamed(client, ask) == {
        index: [(call.function.name, call.function.arguments)] for index, call in enumerate(calls)
    }


def streamed(client: openai.OpenAI, ask: Any) -> dict[int, list[tuple[str, str]]]:
    """The calls of each answer, put together from a stream as OpenAI's documentation says."""
    answers: dict[int, list[tuple[str, str]]] = {}
    ids: dict[int, list[str]] = {}
    reasons = {}
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            calls = answers.setdefault(choice.index, [])
            for piece in choice.delta.tool_calls or ():
                if piece.id is not None:
                    assert piece.index == len(calls)
                    assert piece.function is not None
                    calls.append((piece.function.name, ""))
                    ids.setdefault(choice.index, []).append(piece.id)
                name, arguments = calls[piece.index]
                calls[piece.index] = (name, arguments + piece.function.arguments)
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert set(reasons.values()) == {"tool_calls"}
    return answers
