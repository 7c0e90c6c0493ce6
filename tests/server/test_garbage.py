"""What the garbage collector has to look at: not what stays, and nothing that a request leaves behind."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.generation import Generation
from octavo.server.run import serve
from octavo.settings import Settings
from tests.distributions import write_distribution
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


COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a book", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a book"}], "max_tokens": 3}
GENERATE: dict[str, Any] = {"inputs": "a book", "parameters": {"max_new_tokens": 3}}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/completions", COMPLETION | {"stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/generate", GENERATE),
        ("/generate_stream", GENERATE),
    ],
)
def test_nothing_holds_itself(http: httpx.Client, no_collector: None, route: str, body: dict[str, Any]) -> None:
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


FROZEN = """
import gc
from pathlib import Path
from octavo import hookimpl

@hookimpl
def octavo_step_finished(step):
    Path(__file__).with_name("frozen").write_text(str(gc.get_freeze_count()))
"""


def test_both_processes_leave_alone_what_stays(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "octavo-frozen", "1.0", FROZEN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    here: list[int] = []

    def visit(url: str) -> bool:
        httpx.post(f"{url}/generate", json=GENERATE, timeout=120).raise_for_status()
        here.append(gc.get_freeze_count())
        return False

    settings = Settings(model_id=str(folder), host="127.0.0.1", port=0, device="cpu", max_batch_total_tokens=8192)
    try:
        assert serve(settings, visit) == 0
    finally:
        gc.unfreeze()
    assert min(here[0], int((tmp_path / "frozen").read_text(encoding="utf-8"))) > 10_000
