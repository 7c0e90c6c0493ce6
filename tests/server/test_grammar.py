"""Answers that must fit a schema or a pattern, for the clients that people have.

The model has random weights: jsonschema, re and pydantic say whether what it samples fits.
"""

import json
import re
from typing import Any, Literal

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pydantic
import pytest
from huggingface_hub import InferenceClient

import octavo.server.service
from octavo.plugins import Plugins
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


class Where(pydantic.BaseModel):
    place: Literal["free", "held"]
    owners: list[Literal["a", "b"]] = pydantic.Field(max_length=3)


@pytest.fixture
def client(server: Live, http: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def hub(server: Live, http: httpx.Client) -> InferenceClient:
    return InferenceClient(server.url)


def test_openai_json_schema(client: openai.OpenAI) -> None:
    ask: Any = {
        "model": "octavo", "messages": CHAT, "n": 2, "seed": 1, "max_tokens": 400, "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "where", "schema": SCHEMA, "strict": True}},
    }  # fmt: skip
    texts = {}
    for choice in client.chat.completions.create(**ask).choices:
        assert choice.finish_reason == "stop"
        texts[choice.index] = choice.message.content or ""
        jsonschema.validate(json.loads(texts[choice.index]), SCHEMA)
    assert texts[0] != texts[1]
    streamed = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**ask, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    cut = client.chat.completions.create(**ask | {"max_tokens": 5}).choices[0]
    assert cut.finish_reason == "length"
    assert texts[0].startswith(cut.message.content or "nothing")


def test_openai_parses_into_pydantic(client: openai.OpenAI) -> None:
    ask: Any = {"model": "octavo", "messages": CHAT, "max_tokens": 300, "seed": 2}
    answer = client.chat.completions.parse(response_format=Where, **ask)
    assert isinstance(answer.choices[0].message.parsed, Where)
    tool: Any = openai.pydantic_function_tool(Where)
    answer = client.chat.completions.parse(tools=[tool], tool_choice="required", parallel_tool_calls=False, **ask)
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [type(call.function.parsed_arguments) for call in calls] == [Where]


def test_openai_json_object(client: openai.OpenAI) -> None:
    ask: Any = {"model": "octavo", "seed": 5, "max_tokens": 500, "response_format": {"type": "json_object"}}
    chat = client.chat.completions.create(messages=CHAT, **ask).choices[0]
    assert isinstance(json.loads(chat.message.content or ""), dict)
    text = client.completions.create(
        model="octavo", prompt="A", seed=5, max_tokens=500, extra_body={"response_format": {"type": "json_object"}}
    )
    assert isinstance(json.loads(text.choices[0].text), dict)


def test_hub_grammar(hub: InferenceClient) -> None:
    ask: Any = {"max_new_tokens": 400, "do_sample": True, "seed": 3, "return_full_text": False}
    pattern = r"\d{1,3}(\.\d{1,3}){3}"
    for kind in ("json", "json_schema"):
        grammar: Any = {"type": kind, "value": SCHEMA if kind == "json" else json.dumps(SCHEMA)}
        jsonschema.validate(json.loads(hub.text_generation("A", grammar=grammar, **ask)), SCHEMA)
    regex: Any = {"type": "regex", "value": pattern}
    answer = hub.text_generation("A", grammar=regex, details=True, **ask)
    assert re.fullmatch(pattern, answer.generated_text)
    assert answer.details is not None
    assert answer.details.finish_reason == "eos_token"
    parts = [part.token for part in hub.text_generation("A", grammar=regex, details=True, stream=True, **ask)]
    assert re.fullmatch(pattern, "".join(token.text for token in parts if not token.special))


def test_hub_chat_with_a_format(hub: InferenceClient) -> None:
    shapes: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "where", "schema": SCHEMA}},
        {"type": "json", "value": SCHEMA},
    ]
    for shape in shapes:
        answer = hub.chat_completion(CHAT, response_format=shape, max_tokens=400, seed=3)  # sent in TGI's shape
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)


def function(**parts: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | parts}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "regex", "value": "("}}, "response_format"),
        ({"response_format": {"type": "json", "value": {"type": {"a": []}}}}, "response_format"),
        ({"response_format": {"type": "json", "value": {"enum": ["a" * 40000]}}}, "response_format"),
        ({"response_format": {"type": "json", "value": {"$ref": "#"}}}, "response_format"),
        ({"tools": function(name="two words")}, "tools.0.function.name"),
        ({"tools": function() * 2}, "tools"),
        ({"tools": function(parameters={"type": "string"})}, "tools"),
        ({"tools": function(parameters={"properties": 3})}, "tools"),
        ({"tools": function(parameters={"minProperties": "one"})}, "tools"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": function(), "tool_choice": "g"}, "tool_choice"),
        ({"tools": function(), "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ],
)
def test_what_cannot_be_names_its_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        body = {"messages": CHAT, "max_tokens": 1, "stream": stream} | fields
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 422, response.text
        assert response.json()["error"]["param"] == param
        assert f"`{param}`" in response.json()["error"]["message"]


@pytest.mark.parametrize("schema", ['{"const": NaN}', '{"const": "\\ud800"}', '{"a": ' * 900 + "1" + "}" * 900])
def test_schemas_that_are_no_json(http: httpx.Client, schema: str) -> None:
    body = f'{{"inputs": "A", "parameters": {{"max_new_tokens": 1, "grammar": {{"type": "json", "value": {schema}}}}}}}'
    response = http.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= response.status_code < 500 or response.status_code == 200, response.text


def test_without_the_plugin(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo.server.service, "plugins", lambda: Plugins([]))
    for body in ({"response_format": {"type": "json_object"}}, {"tools": function()}):
        response = http.post("/v1/chat/completions", json={"messages": CHAT} | body)
        assert response.status_code == 422
        assert "pip install 'octavo[grammar]'" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == next(iter(body))
