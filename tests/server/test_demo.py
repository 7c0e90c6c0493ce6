"""`octavo demo`: a server that shows its first answer, and says so when that is none."""

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo import logs
from octavo.server import demo
from octavo.server.http import Server
from octavo.server.run import _visited
from octavo.settings import Settings


@pytest.fixture(autouse=True)
def logged_afterwards() -> Iterator[None]:
    """The demo silences a logger for its process."""
    yield
    logging.getLogger("octavo.server.requests").setLevel(logging.NOTSET)


def test_it_serves_and_shows_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another port than the one that is in use and that nobody asked for; with the key, which it does not show."""
    monkeypatch.setattr(logs, "configure", lambda as_json: None)
    monkeypatch.delenv("PORT", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(
            model_id=str(folder), host="127.0.0.1", device="cpu", max_batch_total_tokens=8192, api_key="first-key"
        )
        said: list[str] = []
        assert demo.demo(settings.model_copy(update={"port": port}), said.append, check=True) == 0
    told = "".join(said)
    assert f"Port {port} is in use" in told
    assert "$ curl -N http://127.0.0.1:" in told
    answer = told.split("\n\n")[1]
    assert answer
    assert "Ctrl-C" not in told
    assert "Bearer YOUR-KEY" in told
    assert "first-key" not in told


class Answering(BaseHTTPRequestHandler):
    """A server that answers as it was told to."""

    health = 200
    status = 200
    lines: tuple[str, ...] = ()

    def do_GET(self) -> None:
        self.send_response(self.health)
        self.end_headers()

    def do_POST(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write("".join(f"{line}\n\n" for line in self.lines).encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def chunk(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}]})


def test_text_is_shown_as_it_comes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    role = "data: " + json.dumps({"choices": [{"delta": {"role": "assistant", "content": None}}]})
    monkeypatch.setattr(Answering, "lines", (role, ": a comment", chunk("A page"), chunk(" table"), "data: [DONE]"))
    said: list[str] = []
    demo._ask(url, said.append)
    assert "A page" in said
    assert " table" in said


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"health": 503}, "/health answers 503"),
        ({"status": 422, "lines": ("no chat template",)}, "answers 422: no chat template"),
        ({"lines": (chunk("A"),)}, "the answer broke off"),
        ({"lines": (chunk("A"), 'data: {"error": {"message": "the engine died"}}')}, "broke off: the engine died"),
        ({"lines": ("data: [DONE]",)}, "answered with no text"),
    ],
)
def test_what_is_no_answer(answer: dict[str, Any], message: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in answer.items():
        monkeypatch.setattr(Answering, name, value)
    with pytest.raises(OSError, match=message):
        demo._ask(url, lambda text: None)


@pytest.mark.parametrize(("result", "stops", "fine"), [(True, 0, True), (False, 1, True), (OSError("no"), 1, False)])
def test_what_the_first_client_says_is_done(result: bool | OSError, stops: int, fine: bool) -> None:
    def visit(url: str) -> bool:
        if isinstance(result, OSError):
            raise result
        return result

    calls: list[None] = []
    server = SimpleNamespace(should_exit=False, stop=lambda: calls.append(None))
    assert asyncio.run(_visited(cast(Server, server), visit, "http://x")) is fine
    assert len(calls) == stops
