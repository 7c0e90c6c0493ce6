"""Answers that must fit a schema or a pattern, and calls of tools, for the clients that people have.

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
from octavo.server.tool_calls import CallReader
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
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Where)


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


def test_hub_chat_with_a_format_and_with_tools(hub: InferenceClient) -> None:
    shapes: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "where", "schema": SCHEMA}},
        {"type": "json", "value": SCHEMA},
    ]
    for shape in shapes:
        answer = hub.chat_completion(CHAT, response_format=shape, max_tokens=400, seed=3)  # sent in TGI's shape
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    answer = hub.chat_completion(CHAT, tools=TOOLS, tool_choice="required", max_tokens=300, seed=8, tool_prompt="Call")
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in answer.choices[0].message.tool_calls or ():
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "evict"}}, "evict"])
def test_openai_tools(client: openai.OpenAI, choice: Any) -> None:
    ask: Any = {
        "model": "octavo", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "n": 2, "seed": 4, "max_tokens": 300,
        "parallel_tool_calls": False, "extra_body": {"tool_prompt": "Call:"},
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
    ("text", "content", "calls"),
    [
        ("2 <tools <tool_cal", "2 <tools <tool_cal", []),
        (WRITTEN, "", CALLS),
        ("I look. " + WRITTEN, "I look. ", CALLS),
        (WRITTEN[:-1], "", CALLS),
        (WRITTEN[: WRITTEN.index("evict") + 3], "", CALLS[:1]),
    ],
)
def test_calls_are_read_however_the_text_is_cut(text: str, content: str, calls: list[Any], size: int) -> None:
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
