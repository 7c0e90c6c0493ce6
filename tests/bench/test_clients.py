"""The benchmark's clients against a made-up server, which sends bytes as it likes."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from octavo.bench import clients
from octavo.bench.exchange import Exchange
from octavo.bench.traffic import Traced, Traffic, poisson

Reply = Callable[[dict[str, Any]], list[bytes]]
"""What is written for a request's body, piece by piece."""


def event(**told: object) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def texts(*said: str) -> bytes:
    return b"".join(event(choices=[{"text": text, "index": 0}]) for text in said)


def usage(tokens: int) -> bytes:
    return event(choices=[], usage={"completion_tokens": tokens}) + b"data: [DONE]\n\n"


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*bodies: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in (*bodies, b""))


@dataclass
class Peer:
    url: str
    connections: int = 0
    running: int = 0
    most_running: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], Peer]]:
    """Starts a server that replies so."""
    servers: list[ThreadingTCPServer] = []

    def start(reply: Reply) -> Peer:
        lock = threading.Lock()

        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                with lock:
                    peer.connections += 1
                while first := self.rfile.readline():
                    head = first + b"".join(iter(self.rfile.readline, b"\r\n"))
                    headers = dict(line.split(": ", 1) for line in head.decode().splitlines()[1:])
                    body = json.loads(self.rfile.read(int(headers["Content-Length"])))
                    with lock:
                        peer.running += 1
                        peer.most_running = max(peer.most_running, peer.running)
                        peer.bodies.append(body)
                        peer.headers.append(head.decode())
                    pieces = reply(body)
                    with lock:
                        peer.running -= 1
                    for piece in pieces:
                        self.wfile.write(piece)
                    if not pieces:
                        return

        server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        peer = Peer(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        servers.append(server)
        return peer

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(peer: Peer, count: int = 1, tokens: int = 3, **more: Any) -> Traced:
    exchanges = [Exchange([1, number], tokens) for number in range(count)]
    chosen: dict[str, Any] = {"streams": 1} | more
    return clients.run(Traffic(url=peer.url, model="m", exchanges=exchanges, **chosen))


def test_events_are_found_wherever_the_bytes_are_cut(serve: Callable[[Reply], Peer]) -> None:
    """A byte at a time, events over two chunks, a comment in between, a text of no characters."""
    body = texts("a", "") + b": keep-alive\n\n" + texts("é", "c") + usage(3)
    whole = chunked(body[:25], body[25:60], body[60:])
    peer = serve(lambda body: [whole[at : at + 1] for at in range(len(whole))])
    (answer,) = send(peer).answers
    assert answer.error is None
    assert answer.tokens == 3
    assert len(answer.texts) == 3, "an event without text shows nothing"
    assert answer.sent <= answer.texts[0] <= answer.texts[1] <= answer.texts[2] <= answer.ended


def test_what_is_asked(serve: Callable[[Reply], Peer]) -> None:
    peer = serve(lambda body: [response(texts("a") + usage(3))])
    send(peer, api_key="secret", cache_salt="salt")
    assert peer.bodies == [
        {
            "model": "m", "prompt": [1, 0], "max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, "cache_salt": "salt",
        }
    ]  # fmt: skip
    assert "POST /v1/completions HTTP/1.1\r\n" in peer.headers[0]
    assert "Authorization: Bearer secret\r\n" in peer.headers[0]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ([response(b'{"error": "full"}', "429 Too Many Requests")], 'status 429: {"error": "full"}'),
        ([response(texts("a") + usage(2))], "2 tokens came, 3 were asked for"),
        ([response(texts("a"))], "0 tokens came, 3 were asked for"),
        ([response(texts("a") + event(error={"message": "dead"}))], '{"message": "dead"}'),
        ([], "ConnectionResetError: the server closed the connection"),
        ([response(b"data: {\n\n")], "an event is none of a completion: Input data was truncated"),
        ([b"SSH-2.0-OpenSSH\r\n"], "HttpParserError: Expected HTTP/"),
    ],
)  # fmt: skip
def test_what_fails_is_counted(serve: Callable[[Reply], Peer], reply: list[bytes], error: str) -> None:
    """And costs no other request."""
    peer = serve(lambda body: reply if body["prompt"][1] == 1 else [response(texts("a") + usage(3))])
    traced = send(peer, count=3)
    before, failed, after = traced.answers
    assert before.error is after.error is None
    assert failed.error is not None
    assert error in failed.error
    assert traced.output_tokens == 6


def test_nobody_there() -> None:
    (answer,) = send(Peer("http://127.0.0.1:1")).answers
    assert "ConnectionRefusedError" in (answer.error or "")


def test_a_closed_loop_keeps_its_connections_and_its_number(serve: Callable[[Reply], Peer]) -> None:
    """Three clients: three requests wait for one another, so that all three are there at once."""
    together = threading.Barrier(3, timeout=60)

    def reply(body: dict[str, Any]) -> list[bytes]:
        together.wait()
        return [response(texts("a") + usage(3))]

    peer = serve(reply)
    traced = send(peer, count=12, streams=3)
    assert [answer.error for answer in traced.answers] == [None] * 12
    assert (peer.most_running, peer.connections) == (3, 3)
    assert traced.seconds > 0
    assert traced.cpu_seconds > 0


def test_an_open_loop_waits_for_nobody(serve: Callable[[Reply], Peer]) -> None:
    """No request is answered before all five are there; each counts from when it was due."""
    together = threading.Barrier(5, timeout=60)

    def reply(body: dict[str, Any]) -> list[bytes]:
        together.wait()
        return [response(texts("a") + usage(3), "200 OK", "Connection: close")]

    arrivals = poisson(100.0, 5, seed=3)
    traced = send(serve(reply), count=5, streams=None, arrivals=arrivals)
    assert [answer.error for answer in traced.answers] == [None] * 5
    assert [answer.sent for answer in traced.answers] == pytest.approx([due - arrivals[0] for due in arrivals])
    assert min(answer.ended for answer in traced.answers) > arrivals[-1] - arrivals[0]
