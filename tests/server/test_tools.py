"""Calls of tools for the clients that people have: what the model is told of them, and what is read in its answers.

The model has random weights: jsonschema says whether the arguments that it samples fit.
"""

import json
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from huggingface_hub import InferenceClient

from octavo.server.tool_calls import CallReader
from tests.server.live import Live
from tests.server.test_grammar import CHAT, SCHEMA

BLOCKS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}
EVICT = {
    "type": "object",
    "properties": {"blocks": BLOCKS},
    "required": ["blocks"],
    "additionalProperties": False,
}
PARAMETERS = {"find": SCHEMA, "evict": EVICT}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"To {name} it.", "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
EVICTS: Any = {"type": "function", "function": {"name": "evict"}}


@pytest.fixture
def client(server: Live, http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_hub_tools(server: Live, http: httpx.Client) -> None:
    hub = InferenceClient(server.url)
    answer = hub.chat_completion(CHAT, tools=TOOLS, tool_choice=EVICTS, max_tokens=300, seed=8, tool_prompt="Call")
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.name == "evict"
    jsonschema.validate(json.loads(call.function.arguments), EVICT)


@pytest.mark.parametrize("choice", ["required", EVICTS, "evict"])
def test_openai_tools(client: openai.OpenAI, choice: Any) -> None:
    ask: Any = {
        "model": "octavo", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "n": 2, "seed": 4,
        "max_tokens": 300, "parallel_tool_calls": False, "extra_body": {"tool_prompt": "Call:"},
    }  # fmt: skip
    calls = []
    for one in client.chat.completions.create(**ask).choices:
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
        (call,) = one.message.tool_calls or []
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        calls.append(call)
    assert calls[0].id != calls[1].id
    if choice != "required":
        assert {call.function.name for call in calls} == {"evict"}
    assert streamed_calls(client, ask) == [[(call.function.name, call.function.arguments)] for call in calls]


@pytest.mark.parametrize(("stop", "reason"), [("</tool_call>", "tool_calls"), ("blocks", "stop")])
def test_a_stop_text_in_a_call(client: openai.OpenAI, stop: str, reason: str) -> None:
    """Behind the arguments the call is whole; within them nobody should take it for one."""
    ask: Any = {
        "model": "octavo", "messages": CHAT, "tools": TOOLS, "tool_choice": EVICTS, "seed": 4, "max_tokens": 300,
        "parallel_tool_calls": False, "extra_body": {"tool_prompt": "Call:"}, "stop": stop,
    }  # fmt: skip
    (answer,) = client.chat.completions.create(**ask).choices
    (call,) = answer.message.tool_calls or []
    *_, last = client.chat.completions.create(**ask, stream=True)
    assert (answer.finish_reason, last.choices[0].finish_reason) == (reason, reason)
    if reason == "stop":
        assert call.function.arguments.split() == ["{", '"']
    else:
        jsonschema.validate(json.loads(call.function.arguments), EVICT)


def streamed_calls(client: openai.OpenAI, ask: Any) -> list[list[tuple[str, str]]]:
    """The calls of two answers, put together from a stream as OpenAI's documentation says."""
    answers: list[list[tuple[str, str]]] = [[], []]
    reasons: dict[int, str] = {}
    for chunk in client.chat.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        calls = answers[choice.index]
        assert not choice.delta.content
        for piece in choice.delta.tool_calls or ():
            if piece.id is not None:
                assert (piece.index, piece.type) == (len(calls), "function")
                calls.append((piece.function.name, ""))
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.function.arguments)
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    assert reasons == {0: "tool_calls", 1: "tool_calls"}
    return answers


def test_openai_tools_that_need_not_be_called(client: openai.OpenAI) -> None:
    """A model of random weights does not call; with `none` it may write what it likes."""
    for choice in ("auto", "none"):
        ask: Any = {"model": "octavo", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "max_tokens": 12}
        answer = client.chat.completions.create(seed=1, extra_body={"tool_prompt": "Call:"}, **ask).choices[0]
        assert answer.message.tool_calls is None
        assert answer.message.content
        assert answer.finish_reason in ("length", "stop")
    both: Any = {"response_format": {"type": "json_object"}, "tools": TOOLS}
    client.chat.completions.create(model="octavo", messages=CHAT, max_tokens=2, tool_choice="none", **both)
    with pytest.raises(openai.UnprocessableEntityError, match="do not go together") as raised:
        client.chat.completions.create(model="octavo", messages=CHAT, **both)
    assert raised.value.param == "response_format"


# What the model is told

CALLED: Any = [
    {"role": "user", "content": "Evict 7."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "evict", "arguments": '{"blocks": [7]}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "done"},
]
HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}call between <tool_call>; {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}!{{ c.function.arguments.blocks }}"
    "{% endfor %} {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def templated(http: httpx.Client, **fields: Any) -> str:
    response = http.post("/chat_tokenize", json=fields)
    assert response.status_code == 200, response.text
    return str(response.json()["templated_text"])


def test_a_template_that_knows_tools_gets_them(
    http: httpx.Client, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service.texts.tokenizer, "chat_template", HERMES)
    assert templated(http, messages=CALLED, tools=TOOLS) == (
        "<tools>find evict call between <tool_call>; user: Evict 7. assistant: ![7] tool: done assistant:"
    )
    named = templated(http, messages=CHAT, tools=TOOLS, tool_choice="evict")
    assert named.startswith("<tools>evict call")
    assert templated(http, messages=CHAT, tools=TOOLS, tool_choice="none") == templated(http, messages=CHAT)


def test_a_template_that_knows_none_is_told_of_them_in_words(http: httpx.Client) -> None:
    text = templated(http, messages=CALLED, tools=TOOLS)
    system, *turns = text.split("\nuser: ")
    assert system.startswith("system: ")
    for tool in TOOLS:
        assert json.dumps(tool["function"]) in system.splitlines()
    call = '<tool_call>\n{"name": "evict", "arguments": {"blocks": [7]}}\n</tool_call>'
    assert call.replace('"evict"', '"NAME"').replace('{"blocks": [7]}', "{...}") in system
    assert turns == [
        f"Evict 7.\nassistant: {call}",
        "<tool_response>\ndone\n</tool_response>\nassistant:",
    ]
    assert templated(http, messages=CHAT, tools=TOOLS, tool_prompt="Call:").startswith("system: Call:\n{")
    both = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert templated(http, messages=both, tools=TOOLS).startswith("system: Be brief.\n\nYou may call")


def test_a_template_without_system_turns(http: httpx.Client, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    monkeypatch.setattr(server.service.texts.tokenizer, "chat_template", strict)
    text = templated(http, messages=CHAT, tools=TOOLS)
    assert text.startswith("user: You may call")
    assert text.endswith("\n\nWhere is block 7?\nassistant:")


# What is read in the answer

CALLS = [("find", '{"a": "}\\n</tool_call> {\\"b\\": [1]}"}'), ("evict", "{}")]
WRITTEN = "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in CALLS
)


@pytest.mark.parametrize("size", [1, 2, 5, 17, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls", "called"),
    [
        ("2 <tools <tool_cal", "2 <tools <tool_cal", [], False),
        (WRITTEN, "", CALLS, True),
        ("I look. " + WRITTEN, "I look. ", CALLS, True),
        (WRITTEN[:-1], "", CALLS, True),
        (WRITTEN.removesuffix("</tool_call>"), "", CALLS, True),
        (WRITTEN[: WRITTEN.index("evict") + 3], "", CALLS[:1], False),
        (WRITTEN[: WRITTEN.index("</tool_call> {")], "", [("find", '{"a": "}\\n')], False),
    ],
)
def test_calls_are_read_however_the_text_is_cut(
    text: str, content: str, calls: list[Any], called: bool, size: int
) -> None:
    reader, said = CallReader(), ""
    found: list[list[str]] = []
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for piece in [one for part in pieces for one in reader.feed(part)] + list(reader.finish()):
        said += piece.content
        if piece.name:
            found.append([piece.name, ""])
        if piece.arguments:
            found[piece.call][1] += piece.arguments
    assert said == content
    assert [tuple(one) for one in found] == calls
    assert reader.called == called
