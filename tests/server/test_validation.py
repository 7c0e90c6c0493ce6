"""What TGI refuses is refused with its words; whatever else is wrong names its field, with a 4xx."""

import json
from typing import Any

import httpx
import pytest

from tests.server.live import Live

PROMPT = "A page table maps"
CHAT = [{"role": "user", "content": "Hi"}]


def tgi(http: httpx.Client, route: str = "/generate", **parameters: Any) -> httpx.Response:
    return http.post(route, json={"inputs": PROMPT, "parameters": {"max_new_tokens": 2} | parameters})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "temperature": 0.5, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"truncate": 1024}, "`truncate` must be strictly positive and at most 1023. Given: 1024"),
        (
            {"max_new_tokens": 1024},
            "`inputs` tokens + `max_new_tokens` must be <= 1024. Given: 17 `inputs` tokens and 1024 `max_new_tokens`",
        ),
        ({"grammar": {"type": "json", "value": {"type": 5}}}, "`parameters.grammar`: grammar is not valid: "),
        ({"grammar": {"type": "json", "value": "{"}}, "`parameters.grammar`: the JSON schema cannot be read"),
        ({"grammar": {"type": "regex", "value": "("}}, "`parameters.grammar`: grammar is not valid: unclosed group"),
        ({"grammar": {"type": "regex", "value": {}}}, "`parameters.grammar`: the type regex needs a text"),
        ({"grammar": {"type": "regex"}}, "`parameters.grammar.value`"),
        ({"grammar": {}}, "`parameters.grammar.type`"),
        ({"adapter_id": "a"}, "`parameters.adapter_id`: it is not supported yet: leave it out"),
        ({"watermark": True}, "`parameters.watermark`: it is not supported yet: leave it out"),
    ],
)
def test_tgis_rules(http: httpx.Client, parameters: dict[str, Any], message: str) -> None:
    for route in ("/generate", "/generate_stream", "/"):
        if "best_of" in parameters and route == "/generate_stream":
            continue
        response = tgi(http, route, **parameters)
        assert response.status_code == 422
        assert response.json()["error"].startswith(f"Input validation error: {message}")
        assert response.json()["error_type"] == "validation"


@pytest.mark.parametrize(
    ("parameters", "field"), [({"best_of": 2, "do_sample": True}, "best_of"), ({"decoder_input_details": True},) * 2]
)
def test_what_needs_the_whole_answer_is_no_stream(http: httpx.Client, parameters: dict[str, Any], field: Any) -> None:
    response = tgi(http, "/generate_stream", **parameters)
    assert response.status_code == 422
    name = field if isinstance(field, str) else "decoder_input_details"
    assert f"`{name}`" in response.json()["error"]


def test_too_long_a_prompt(http: httpx.Client) -> None:
    response = http.post("/generate", json={"inputs": "a" * 1024})
    assert response.status_code == 422
    assert "at most 1023 tokens. Given: 1024" in response.json()["error"]
    assert http.post("/generate", json={"inputs": "a" * 1023}).status_code == 200
    kept = http.post("/generate", json={"inputs": "a" * 2000, "parameters": {"truncate": 9, "max_new_tokens": 1}})
    assert kept.headers["x-prompt-tokens"] == "9"


WRONG: dict[str, list[Any]] = {
    "temperature": [0, -1, "warm", True, [], 1e400],
    "repetition_penalty": [0, -1, "none"],
    "frequency_penalty": [2.5, -2.5],
    "top_k": [0, -1, 1.5, "7"],
    "top_p": [0, 1.0, 1.5],
    "typical_p": [0, 1.0],
    "max_new_tokens": [0, -1, 2**40, 1.5, True, "2"],
    "truncate": [0, -1],
    "best_of": [0, -1],
    "top_n_tokens": [-1],
    "seed": [-1, 2**64, 0.5],
    "stop": ["text", [""], [1], {}],
    "do_sample": [1, "yes"],
    "details": ["yes"],
}
WRONG_PARAMETERS = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), WRONG_PARAMETERS)
def test_a_wrong_value_names_its_field(http: httpx.Client, name: str, value: Any) -> None:
    body = json.dumps({"inputs": PROMPT, "parameters": {name: value}})
    response = http.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert f"`parameters.{name}" in response.json()["error"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_are_none(http: httpx.Client, number: str) -> None:
    body = f'{{"inputs": "a", "parameters": {{"temperature": {number}}}}}'
    response = http.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    assert "temperature" in response.json()["error"] or response.status_code == 400


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"{}", b"\xff\xfe", b'{"inputs": 1, "prompt": 1, "messages": 1}',
     b"[" * 100_000, b'{"inputs": "\\ud800", "prompt": "\\ud800", "messages": [{"role": "u", "content": "\\ud800"}]}',
     b'{"inputs": "", "prompt": "", "messages": []}'],
    ids=lambda body: repr(body[:24]),
)  # fmt: skip
def test_a_body_that_is_none(http: httpx.Client, route: str, body: bytes) -> None:
    response = http.post(route, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    error = response.json()["error"]
    message = error["message"] if route.startswith("/v1") else error
    assert any(word in message for word in ("body", "inputs", "prompt", "messages"))


OPENAI_WRONG: list[tuple[str, Any]] = [
    ("n", 0), ("n", 3), ("n", "1"), ("max_tokens", 0), ("max_tokens", -1), ("temperature", -0.1), ("top_p", 1.1),
    ("stop", [""]), ("stop", ["a"] * 5), ("stop", 1), ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}),
    ("logit_bias", []), ("logit_bias", {"100000": 1}), ("logit_bias", {"2147483648": 1}), ("seed", "a"),
    ("presence_penalty", 3), ("stream", "yes"),
    ("stream_options", 1), ("cache_salt", "a" * 257), ("response_format", {"type": "regex"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), OPENAI_WRONG, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize(
    ("route", "body"), [("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": CHAT})]
)
def test_a_wrong_openai_field_is_named(
    http: httpx.Client, route: str, body: dict[str, Any], name: str, value: Any
) -> None:
    response = http.post(route, json={**body, name: value})
    assert response.status_code == 422
    error = response.json()["error"]
    assert name in error["message"]
    assert (error["type"], error["http_status_code"]) == ("invalid_request_error", 422)


@pytest.mark.parametrize(
    ("route", "body", "name"),
    [
        ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": [999_999]}, "999999"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": "a" * 1024}, "`prompt` must have at most 1023 tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1024}, "1 `prompt` tokens and 1024 `max_tokens`"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1024}, "`messages` tokens and 1024 `max_tokens`"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": 1024},
            "`messages` tokens and 1024 `max_completion_tokens`",
        ),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "logprobs": 6}, "logprobs"),
        ("/v1/completions", {"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        ("/v1/completions", {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ("/v1/completions", {"prompt": "a", "echo": True, "stream": True}, "echo"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 6, "logprobs": True}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{}]}, "tools"),
        ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"chat_template": ""}}, "chat_template"),
    ],
)
def test_more_openai_fields(http: httpx.Client, route: str, body: dict[str, Any], name: str) -> None:
    response = http.post(route, json=body)
    assert response.status_code == 422
    assert name in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "message",
    ['{"role": "\\ud800", "content": ""}', '{"role": "u", "content": [{"type": "text", "text": "\\udfff"}]}',
     '{"role": "u", "content": "", "name": "\\ud800"}'],
)  # fmt: skip
def test_half_characters_in_a_chat(http: httpx.Client, message: str) -> None:
    body = f'{{"messages": [{message}], "max_tokens": 1}}'
    response = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert "messages.0" in response.json()["error"]["message"]


def test_half_characters_that_only_the_template_sees(
    http: httpx.Client, server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.service.texts.tokenizer, "chat_template", "{{ messages[0].mood }}{{ colour }}")
    extra = '"messages": [{"role": "u", "content": "", "mood": "\\ud800"}]'
    variable = '"messages": [{"role": "u", "content": ""}], "chat_template_kwargs": {"colour": "\\ud800"}'
    for where in (extra, variable):
        response = http.post(
            "/v1/chat/completions", content=f"{{{where}}}", headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 422
        assert "half of a surrogate pair" in response.json()["error"]["message"]


def test_unknown_fields_and_routes(http: httpx.Client) -> None:
    assert tgi(http, colour="red").status_code == 200
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "user": "me"}).status_code == 200
    assert (response := http.get("/nowhere")).status_code == 404
    assert response.json()["error_type"] == "not_found"
    assert (response := http.get("/v1/completions")).status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert http.put("/docs").headers["allow"]
    assert http.put("/").headers["allow"] == "GET, POST"


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan", "inf"])
def test_a_deadline_that_is_none(http: httpx.Client, seconds: str) -> None:
    for route in ("/generate", "/generate_stream"):
        response = http.post(route, json={"inputs": PROMPT}, headers={"X-Request-Timeout": seconds})
        assert response.status_code == 422
        assert "X-Request-Timeout" in response.json()["error"]


def test_a_template_that_raises(http: httpx.Client, server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.service.texts.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    response = http.post("/v1/chat/completions", json={"messages": CHAT})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "template_error")
    assert "roles must alternate" in response.json()["error"]["message"]
    monkeypatch.setattr(tokenizer, "chat_template", None)
    response = http.post("/v1/chat/completions", json={"messages": CHAT, "stream": True})
    assert response.status_code == 422
    assert "no chat template" in response.json()["error"]["message"]
