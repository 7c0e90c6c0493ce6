"""What is no HTTP, or stops in the middle of it: the connection ends, nothing is held, and the server goes on."""

import json
import socket

import httpx
import pytest

from octavo.server import limits, protocol
from tests.server.live import Live, connect, until

GARBAGE = {
    "bytes": b"\x00\x01\x02\x03\r\n\r\n",
    "a TLS handshake": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 100,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9": b"GET / HTTP/9.9\r\n\r\n",
    "a negative length": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "a huge length": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "two lengths": b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a chunk of no size": b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    "length and chunks": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    "endless headers": b"GET /info HTTP/1.1\r\nHost: x\r\n" + b"X-More: a\r\n" * 100_000,
    "an endless header": b"GET /info HTTP/1.1\r\nHost: x\r\nX-More: " + b"a" * 1_000_000,
    "an endless path": b"GET /" + b"a" * 1_000_000,
}


@pytest.mark.parametrize("name", GARBAGE)
def test_what_is_no_http(server: Live, http: httpx.Client, name: str) -> None:
    with connect(server) as connection:
        try:
            connection.sendall(GARBAGE[name])
            status = connection.recv(100).partition(b"\r\n")[0]
        except ConnectionError:  # it was let go while it still sent
            status = b"HTTP/1.1 431"
        assert status.startswith(b"HTTP/1.1 431 " if "endless" in name else b"HTTP/1.1 400 ")
        assert connection_ends(connection)


def connection_ends(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def request(body: bytes, length: int | None = None) -> bytes:
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length or len(body)}"
    )
    return f"{head}\r\n\r\n".encode() + body


def test_requests_one_behind_the_other(server: Live, http: httpx.Client) -> None:
    """Answered in their order; garbage behind them ends the connection and nothing else."""
    one = request(json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 1}}).encode())
    with connect(server) as connection, connection.makefile("rb") as answers:
        connection.sendall(one * 3)
        for _ in range(3):
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
            headers = dict(line.rstrip().split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
            assert b"generated_text" in answers.read(int(headers[b"content-length"]))
        connection.sendall(one + b"\x00\x01\x02\r\n\r\n")
        assert connection_ends(connection)


@pytest.mark.parametrize("part", ["nothing", "a line", "headers", "body"])
def test_a_client_that_stops_in_the_middle(
    server: Live, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """It holds no place, and its connection only for so long."""
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    whole = request(b'{"inputs": "a"', 100)
    sent = {"nothing": b"", "a line": whole[:10], "headers": whole[:60], "body": whole}[part]
    with connect(server) as connection:
        connection.sendall(sent)
        answer = connection.makefile("rb").read()
        assert server.service.admission.taken == 0
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert f"{'body' if part == 'body' else 'headers'} did not come within 0.2 s".encode() in answer


def test_trailers_without_end(server: Live, http: httpx.Client) -> None:
    """They are kept as headers are: the connection ends long before its time is over, which a 408 would say."""
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head + b"1\r\n{\r\n")
        try:
            connection.sendall(b"0\r\n" + b"X-More: a\r\n" * 100_000)
            answer = connection.recv(100)
        except ConnectionError:  # it was let go while it still sent
            answer = b""
    assert answer == b""


def test_a_body_that_was_answered_before_it_was_whole(
    server: Live, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rest is waited for no longer than a head, and what ends the connection is no further answer."""
    before = len(server.http.server_state.connections)
    with connect(server) as connection, connection.makefile("rb") as answers:
        until(lambda: len(server.http.server_state.connections) == before + 1)
        monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
        connection.sendall(request(b"{", 100).replace(b"/generate", b"/nothing"))
        assert answers.readline() == b"HTTP/1.1 404 Not Found\r\n"
        headers = dict(line.rstrip().split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
        answers.read(int(headers[b"content-length"]))
        try:
            connection.sendall(b"a")
            rest = answers.read()
        except ConnectionError:
            rest = b""
    assert rest == b""


def test_line_breaks_behind_a_request_do_not_end_its_answer(
    server: Live, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old clients send them. The answer takes longer than a head may."""
    whole = request(json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 500}}).encode())
    whole = whole.replace(b"/generate", b"/generate_stream").replace(b"Host: x", b"Host: x\r\nConnection: close")
    with connect(server) as connection, connection.makefile("rb") as answer:
        connection.sendall(whole)
        until(lambda: server.service.admission.taken == 1)
        monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.01)
        connection.sendall(b"\r\n")
        assert b'"generated_text":"' in answer.read()


def test_a_client_that_leaves_in_the_middle(server: Live, http: httpx.Client) -> None:
    before = len(server.http.server_state.connections)
    for sent in (b"", b"POST /gen", request(b'{"inputs": "a"', 100)):
        with connect(server) as connection:
            connection.sendall(sent)
            until(lambda: len(server.http.server_state.connections) == before + 1)
        until(lambda: len(server.http.server_state.connections) == before)
    assert server.service.admission.taken == 0
