"""A server with keys and tight limits: who gets in, how many at once, and what is left when a client goes."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.checkpoints import EOS
from tests.server.live import ORIGIN, Live, hung, key, until

LONG: dict[str, Any] = {"prompt": "count", "max_tokens": 32_000, "logit_bias": {str(EOS): -100}, "stream": True}
"""Longer than any test waits: its end is always the client's doing, or the deadline's."""
SHORT = {"inputs": "count", "parameters": {"max_new_tokens": 2}}


@pytest.fixture
def server(tight: Live) -> Live:
    return tight


@pytest.fixture
def http(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120, headers=key("first-key")) as client:
        yield client
    until(lambda: server.held() == (0, 0) and server.service.admission.taken == 0)


def test_every_route_but_health_needs_a_key(server: Live) -> None:
    described = httpx.get(f"{server.url}/openapi.json", headers=key("second-key")).json()
    paths = {*described["paths"], "/openapi.json", "/docs"}
    assert {"/metrics", "/info", "/v1/models", "/chat_tokenize", "/v1/completions"} <= paths
    for path in paths:
        for method in ("GET", "POST"):
            response = httpx.request(method, server.url + path, json={} if method == "POST" else None)
            if (path, method) == ("/", "GET") or path in ("/health", "/ping"):
                assert response.status_code in (200, 405)
            else:
                assert response.status_code == 401
                assert response.headers["www-authenticate"].split()[0] == ("Basic" if path == "/ui/state" else "Bearer")
                assert "API key" in response.text


def test_the_description_says_which_routes_need_a_key(server: Live) -> None:
    described = httpx.get(f"{server.url}/openapi.json", headers=key("first-key")).json()
    (scheme,) = described["components"]["securitySchemes"].items()
    assert scheme[1] == {"type": "http", "scheme": "bearer"}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            refused = httpx.request(method, server.url + path, json={}).status_code == 401
            assert operation["security"] == ([{scheme[0]: []}] if refused else [])


@pytest.mark.parametrize(
    "authorization",
    ["first-key", "Basic first-key", "Bearer first-ke", "Bearer first-key2", "Bearer", "bearer\tx", ""],
)
def test_a_wrong_key(server: Live, authorization: str) -> None:
    response = httpx.get(f"{server.url}/v1/models", headers={"Authorization": authorization})
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")


def test_both_keys_are_taken(server: Live) -> None:
    for name in ("first-key", "second-key"):
        assert httpx.get(f"{server.url}/info", headers=key(name)).status_code == 200
    assert httpx.get(f"{server.url}/info", headers={"Authorization": "bearer first-key"}).status_code == 200


def test_a_prompt_is_cached_for_its_key_and_its_salt_alone(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "shared by nobody but me, " * 4, "max_tokens": 1}

    def cached(name: str, **more: Any) -> int:
        answer = http.post("/v1/completions", json=body | more, headers=key(name)).json()
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert cached("first-key") == 0
    assert cached("first-key") == 99
    assert cached("second-key") == 0
    assert cached("second-key") == 99
    assert cached("first-key", cache_salt="a") == 0
    assert cached("first-key", cache_salt="a") == 99
    assert cached("second-key", cache_salt="a") == 0


def test_preflight_needs_no_key(server: Live) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-any"}
    response = httpx.options(f"{server.url}/generate", headers=asked)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert httpx.options(f"{server.url}/generate", headers=asked | {"Origin": "https://x.example"}).status_code == 400
    told = httpx.get(f"{server.url}/info", headers={"Origin": ORIGIN})  # a refusal can be read by the page too
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (401, ORIGIN)


def test_the_third_at_once_is_turned_away(server: Live, http: httpx.Client) -> None:
    with ExitStack() as streams:
        for _ in range(2):
            streams.enter_context(hung(server, "/v1/completions", LONG))
        until(lambda: server.held()[1] == 2)
        for path, body in [
            ("/generate", SHORT),
            ("/generate_stream", SHORT),
            ("/v1/completions", {"prompt": "a", "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "u", "content": "a"}]}),
        ]:
            refused = http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "Model is overloaded" in refused.text
    until(lambda: http.post("/generate", json=SHORT).status_code == 200)


def test_more_sequences_than_there_are_places(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
    assert response.status_code == 422
    assert (
        "asks for 4 sequences, `prompt` times `n` or `best_of`, and the server runs at most 2"
        in response.json()["error"]["message"]
    )


def test_long_bodies(http: httpx.Client) -> None:
    body = json.dumps({"inputs": "a" * 11_000}).encode()
    announced = http.post("/generate", content=body)
    chunked = http.post("/generate", content=iter([body[:6000], body[6000:]]))
    for response in (announced, chunked):
        assert response.status_code == 413
        assert response.json() == {
            "error": "The body is longer than 10000 bytes (payload_limit)",
            "error_type": "validation",
        }


def test_a_client_that_leaves_its_stream(server: Live, http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()  # forgotten, it would close the connection
        next(lines)
        assert server.held()[1] == 1
    until(lambda: server.held() == (0, 0))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_hangs_up(server: Live, http: httpx.Client, route: str, streaming: bool) -> None:
    """Two sequences on an engine that runs one at a time: one decodes, one waits; both end."""
    body = LONG | {"messages": [{"role": "u", "content": "count"}], "n": 2, "stream": streaming}
    with hung(server, route, body):
        until(lambda: server.held()[1] == 2)
    until(lambda: server.held() == (0, 0))


def test_a_client_that_hangs_up_in_the_queue(server: Live, http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()  # forgotten, it would close the connection
        next(lines)
        with hung(server, "/generate", SHORT):
            until(lambda: server.held()[1] == 2)
        until(lambda: server.held()[1] == 1)
        assert server.service.admission.taken == 1


QUEUED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", SHORT),
    ("/generate_stream", SHORT),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "u", "content": "a"}]}),
]


@pytest.mark.parametrize(("route", "body"), QUEUED)
def test_a_request_that_waits_too_long(
    server: Live, http: httpx.Client, route: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only place is taken: who does not get it in time has a status, streams too, and is gone from the engine."""
    with http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()  # forgotten, it would close the connection
        next(lines)
        monkeypatch.setattr(
            server.service, "settings", server.service.settings.model_copy(update={"max_queue_seconds": 0.01})
        )
        before = failures(http, "queue_timeout")
        refused = http.post(route, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error = refused.json()["error"]
        message, kind = (error, refused.json()["error_type"]) if "error_type" in refused.json() else (
            error["message"], error["code"])  # fmt: skip
        assert kind == "queue_timeout"
        assert "waited 0.01 s (max_queue_seconds)" in message
        assert failures(http, "queue_timeout") == before + 1
        until(lambda: server.held()[1] == 1)
        assert next(lines) is not None  # the one that runs is none the worse


def failures(http: httpx.Client, kind: str) -> float:
    text = http.get("/metrics").text
    return float(next((line.split()[-1] for line in text.splitlines() if f'failure{{err="{kind}"}}' in line), 0))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_deadline_ends_what_takes_longer(server: Live, http: httpx.Client, streaming: bool) -> None:
    """A stream that has begun tells it as an event, and does not end as if it were whole."""
    response = http.post("/v1/completions", json=LONG | {"stream": streaming}, headers={"X-Request-Timeout": "0.5"})
    assert response.status_code == (200 if "[DONE]" in response.text or response.text.startswith("data:") else 504)
    assert "not answered within its 0.5 s" in response.text
    assert "[DONE]" not in response.text
    until(lambda: server.held() == (0, 0))
    assert 'tgi_request_failure{err="timeout"}' in http.get("/metrics").text
