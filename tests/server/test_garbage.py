"""What a request leaves behind: nothing that only the garbage collector finds, which would grow with the prompts."""

import gc
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.generation import Generation
from tests.server.live import until

KINDS = (RequestResponseCycle, Request, Generation)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Then all that is still there is held by somebody, or by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in KINDS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream"])
def test_nothing_holds_itself(http: httpx.Client, no_collector: None, route: str, stream: bool) -> None:
    body = {
        "/v1/completions": {"model": "m", "prompt": "a book", "max_tokens": 3, "stream": stream},
        "/v1/chat/completions": {
            "model": "m", "messages": [{"role": "user", "content": "a book"}], "max_tokens": 3, "stream": stream,
        },
    }.get(route, {"inputs": "a book", "parameters": {"max_new_tokens": 3}})  # fmt: skip
    http.post(route, json=body).raise_for_status()  # the connection keeps its last request
    before = alive()
    for _ in range(5):
        http.post(route, json=body).raise_for_status()
    until(lambda: alive() <= before)  # the server ends a request behind its answer


def test_refusals_do_not_either(http: httpx.Client, no_collector: None) -> None:
    wrong = {"model": "m", "prompt": "a book", "max_tokens": -1}
    assert http.post("/v1/completions", json=wrong).status_code == 422
    before = alive()
    for _ in range(5):
        assert http.post("/v1/completions", json=wrong).status_code == 422
    until(lambda: alive() <= before)
