"""What no client should send: the server refuses it with a 4xx that names it, holds nothing, and goes on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

MINIMAL: dict[str, dict[str, Any]] = {
    "/": {"inputs": "a", "parameters": {"max_new_tokens": 1}},
    "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 1}},
    "/generate_stream": {"inputs": "a", "parameters": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"inputs": "a"},
    "/chat_tokenize": {"messages": [{"role": "user", "content": "a"}]},
}
JSON = {"Content-Type": "application/json"}


# Every field of every route, as the description has them

HALF, NAN = "\ud800", float("nan")
VALUES: tuple[Any, ...] = (
    {},
    [],
    [[]],
    "text",
    "",
    1.5,
    -1.5,
    True,
    0,
    -1,
    10**30,
    -(10**400),
    float("inf"),
    float("-inf"),
    NAN,
    HALF,
)
NEVER = (float("inf"), float("-inf"), NAN, HALF)
"""No field takes these, whatever JSON schema says of them."""


def fields(description: dict[str, Any], schema: dict[str, Any], path: tuple[str | int, ...] = ()) -> (
    Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]
):  # fmt: skip
    """The path and the schema of each field, those of fields within."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from fields(description, description["components"]["schemas"][name], path)
    for one in schema.get("anyOf", ()):
        yield from fields(description, one, path)
    if "items" in schema:
        yield from fields(description, schema["items"], (*path, 0))
    for name, one in schema.get("properties", {}).items():
        yield (*path, name), one
        yield from fields(description, one, (*path, name))


def put(body: Any, path: tuple[str | int, ...], value: object) -> None:
    """Into a place of the body, where what is around it is made if it is not there."""
    for part, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(part, int) and len(body) <= part:
            body.append(None)
        inside = body[part] if isinstance(part, int) else body.get(part)
        if following is None:
            body[part] = value
        elif not isinstance(inside, list if isinstance(following, int) else dict):
            body[part] = [] if isinstance(following, int) else {}
        body = body[part]


def test_the_bodies_are_all_there_are(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})} == MINIMAL.keys()


@pytest.mark.parametrize("route", MINIMAL)
def test_a_wrong_value_in_any_field(http: httpx.Client, route: str) -> None:
    description = http.get("/openapi.json").json()
    schema = description["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    sent = 0
    for path, field in fields(description, schema):
        allowed = jsonschema.Draft202012Validator(field | {"components": description["components"]})
        for value in VALUES:
            if not any(value is never for never in NEVER) and allowed.is_valid(value):
                continue
            body = json.loads(json.dumps(MINIMAL[route]))
            put(body, path, value)
            response = http.post(route, content=json.dumps(body), headers=JSON)
            assert response.status_code == 422, (path, value, response.text)
            assert any(str(part) in message(response) for part in path), (path, value, response.text)
            sent += 1
    assert sent > 10 * len(MINIMAL[route])


def message(response: httpx.Response) -> str:
    error = response.json()["error"]
    text: str = error if isinstance(error, str) else error["message"]
    return text


# Bodies that are no JSON, and JSON that is none of ours


def padded(inside: str) -> bytes:
    return f'{{"inputs": "a", "prompt": "a", "messages": [{{"role": "u", "content": "a"}}], "more": {inside}}}'.encode()


NO_JSON: dict[str, bytes] = {
    "trailing comma": b'{"inputs": "a",}',
    "single quotes": b"{'inputs': 'a'}",
    "nul": b'{"inputs": "a\x00"}',
    "only nul": b"\x00" * 100,
    "latin-1": '{"inputs": "\xe9"}'.encode("latin-1"),
    "half utf-16": '{"inputs": "a"}'.encode("utf-16")[:-1],
    "gzip": bytes.fromhex("1f8b08000000000000ffab56cacc2b282d2956b2524a54aa0500b3ad4b410f000000"),
    "deep lists": padded("[" * 100_000),
    "deep lists that end": padded("[" * 100_000 + "]" * 100_000),
    "deep objects": padded('{"a":' * 100_000 + "1" + "}" * 100_000),
    "a very long number": padded("9" * 10_000),
    "two bodies": b'{"inputs": "a"}{"inputs": "a"}',
    "form": b"inputs=a&parameters=b",
}


@pytest.mark.parametrize("name", NO_JSON)
def test_no_json(http: httpx.Client, name: str) -> None:
    for route in MINIMAL:
        response = http.post(route, content=NO_JSON[name], headers=JSON)
        assert response.status_code == 400
        assert "body is not JSON" in message(response)


def test_a_body_that_was_cut_off(http: httpx.Client) -> None:
    body = json.dumps(MINIMAL["/generate"]).encode()
    for end in range(len(body)):
        assert http.post("/generate", content=body[:end], headers=JSON).status_code in (400, 422)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json_in_other_encodings(http: httpx.Client, encoding: str) -> None:
    assert http.post("/tokenize", content='{"inputs": "\xe9"}'.encode(encoding), headers=JSON).json()[0]["stop"] == 1


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data; boundary=x", "application/jsonp", "\xff"])
def test_another_content_type(http: httpx.Client, kind: str) -> None:
    for route, body in MINIMAL.items():
        response = http.post(route, content=json.dumps(body), headers=[(b"Content-Type", kind.encode("latin-1"))])
        assert response.status_code == 422
        assert "Content-Type" in message(response)


@pytest.mark.parametrize("where", ["chat_template_kwargs", "messages"])
@pytest.mark.parametrize("depth", [200, 900])
def test_deep_values_for_the_template(http: httpx.Client, where: str, depth: int) -> None:
    inside = json.loads("[" * depth + "]" * depth)
    body = json.loads(json.dumps(MINIMAL["/v1/chat/completions"]))
    if where == "messages":
        body["messages"][0]["mood"] = inside
    else:
        body[where] = {"mood": inside}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code in ((200,) if depth == 200 else (200, 422))  # by how deep this Python goes


def test_repeated_keys_count_once(http: httpx.Client) -> None:
    body = b'{"inputs": 1, "inputs": "ab", "inputs": "abc"}'
    assert len(http.post("/tokenize", content=body, headers=JSON).json()) == 3


def test_texts_that_are_too_long(http: httpx.Client) -> None:
    """For the limit on bodies; and just below it, so that the tokenizer sees all of it."""
    for route in MINIMAL:
        assert http.post(route, json={"inputs": "a" * 10_000_000}).status_code == 413
    response = http.post("/generate", json={"inputs": "a" * 1_990_000})
    assert (response.status_code, "at most 1023 tokens" in message(response)) == (422, True)


def test_more_biases_than_a_step_should_bear(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", "logit_bias": {f"{id:010}": 1 for id in range(1025)}})
    assert (response.status_code, "logit_bias" in message(response)) == (422, True)


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_more_sequences_than_places(http: httpx.Client, field: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", field: 10**300})
    assert (response.status_code, f"`{field}`" in message(response)) == (422, True)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"])
def test_other_methods(http: httpx.Client, method: str) -> None:
    for route in ("/generate", "/v1/completions", "/tokenize"):
        response = http.request(method, route)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
