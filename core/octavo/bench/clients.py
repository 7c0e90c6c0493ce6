"""The clients of a benchmark, all in one process: python -m octavo.bench.clients TRAFFIC TRACED.

They share the machine with the server that is measured, so they cost little: bytes are kept as they come, with the
time, and read when all is over.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec
import uvloop

from octavo.bench.exchange import Exchange
from octavo.bench.job import program
from octavo.bench.traffic import Answer, Traced, Traffic

PATIENCE = 600.0
"""Seconds: a request that is not answered by then has failed."""
PAUSE = 0.001
"""Seconds in which a closed loop looks at nothing after something has come. A server writes to all its clients behind
each step: it would wake this process for each of them, at its own cost. A time may be that much too long."""
SHOWN = 200
"""Bytes of an error's body."""


@dataclass(slots=True)
class Response:
    """One response as it comes."""

    done: asyncio.Future[None]
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """Of the body, with the times at which they came."""
    ended: float = 0.0
    """When all of it had come."""


class Connection(asyncio.Protocol):
    """A connection that is kept; one request at a time. httptools calls its methods."""

    def __init__(self, pause: Callable[[], None]) -> None:
        """`pause` is called for bytes that have come."""
        self._parser = httptools.HttpResponseParser(self)
        self._pause = pause
        self._response: Response | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open (asyncio)."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one but in name

    def data_received(self, data: bytes) -> None:
        """Bytes have come (asyncio)."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.connection_lost(error)
            self.transport.abort()
        self._pause()  # behind whoever waits for the response, and sends the next request at once

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed (asyncio)."""
        self.closed = True
        if self._response is not None and not self._response.done.done():
            self._response.done.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def on_body(self, body: bytes) -> None:
        """A piece of the response's body (httptools)."""
        if self._response is not None:
            self._response.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        """The response is whole (httptools)."""
        if self._response is not None and not self._response.done.done():
            self._response.status, self._response.ended = self._parser.get_status_code(), self._now
            self._response.done.set_result(None)
        if not self._parser.should_keep_alive():
            self.transport.close()
            self.closed = True

    async def ask(self, request: bytes) -> Response:
        """Send a request and wait for all of its response. Raises OSError, or TimeoutError."""
        response = self._response = Response(asyncio.get_running_loop().create_future())
        self.transport.write(request)
        try:
            async with asyncio.timeout(PATIENCE):
                await response.done
        except BaseException:
            self.transport.abort()
            self.closed = True
            raise
        return response


@dataclass(slots=True)
class Exchanged:
    """One request's times, and its response, not read yet."""

    due: float
    ended: float
    response: Response | None
    error: str | None = None


class Clients:
    """Connections to one server, as many as are needed at once."""

    def __init__(self, traffic: Traffic) -> None:
        self._url = urlsplit(traffic.url)
        self._traffic = traffic
        self._requests = [_request(self._url, traffic, exchange) for exchange in traffic.exchanges]
        self._idle: list[Connection] = []
        self._exchanged: dict[int, Exchanged] = {}
        self._pausing = False

    async def run(self) -> list[Exchanged]:
        """Send everything; in the order of the requests."""
        if self._traffic.arrivals is None:
            numbers = iter(range(len(self._requests)))
            await asyncio.gather(*(self._closed_loop(numbers) for _ in range(self._traffic.streams or 1)))
        else:
            start = time.perf_counter()
            due = [start + arrival for arrival in self._traffic.arrivals]
            await asyncio.gather(*(self._exchange(number, one) for number, one in enumerate(due)))
        for connection in self._idle:
            connection.transport.close()
        return [self._exchanged[number] for number in range(len(self._requests))]

    async def _closed_loop(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._exchange(number, time.perf_counter())

    async def _exchange(self, number: int, due: float) -> None:
        if (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        response = error = None
        try:
            connection = await self._connection()
            response = await connection.ask(self._requests[number])
            if not connection.closed:
                self._idle.append(connection)
        except (OSError, TimeoutError, httptools.HttpParserError) as failed:
            error = f"{type(failed).__name__}: {failed}"
        ended = time.perf_counter() if response is None else response.ended
        self._exchanged[number] = Exchanged(due, ended, response, error)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        host, secure = self._url.hostname or "", self._url.scheme == "https"
        port = self._url.port or (443 if secure else 80)
        _, made = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._pause), host, port, ssl=secure or None
        )
        return made

    def _pause(self) -> None:
        """Look at nothing for a while, once all that is there has been read; arrivals that are due would be late."""
        if not self._pausing and self._traffic.arrivals is None:
            self._pausing = True
            asyncio.get_running_loop().call_soon(self._sleep)

    def _sleep(self) -> None:
        self._pausing = False
        time.sleep(PAUSE)


def _request(url: SplitResult, traffic: Traffic, exchange: Exchange) -> bytes:
    body = {
        "model": traffic.model,
        "prompt": exchange.prompt,
        "max_tokens": exchange.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if traffic.cache_salt is not None:
        body["cache_salt"] = traffic.cache_salt
    content = msgspec.json.encode(body)
    lines = [
        f"POST {url.path.rstrip('/')}/v1/completions HTTP/1.1",
        f"Host: {url.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *([f"Authorization: Bearer {traffic.api_key}"] if traffic.api_key else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


class _Choice(msgspec.Struct):
    text: str = ""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode


def answer(exchange: Exchange, exchanged: Exchanged, start: float) -> Answer:
    """Read a response: when its texts came, and whether it is what was asked for. Times count from `start`."""
    texts: list[float] = []
    tokens, error = 0, exchanged.error
    response = exchanged.response
    if response is not None and response.status != 200:
        error = f"status {response.status}: {_body(response)[:SHOWN].decode(errors='replace')}"
    elif response is not None:
        for came, data in _events(response.pieces):
            try:
                event = _decode(data)
            except msgspec.MsgspecError as failed:
                error = f"an event is none of a completion: {failed}"
                break
            if any(choice.text for choice in event.choices):
                texts.append(came - start)
            if event.usage is not None:
                tokens = event.usage.completion_tokens
            if (told := bytes(event.error)) not in (b"", b"null"):
                error = told[:SHOWN].decode(errors="replace")
        if error is None and tokens != exchange.answer_tokens:
            error = f"{tokens} tokens came, {exchange.answer_tokens} were asked for"
    return Answer(sent=exchanged.due - start, texts=texts, ended=exchanged.ended - start, tokens=tokens, error=error)


def _body(response: Response) -> bytes:
    return b"".join(piece for _, piece in response.pieces)


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each event of a stream, with the time at which its last byte came."""
    waiting = b""
    for came, piece in pieces:
        *events, waiting = (waiting + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if data and data != b"[DONE]":
                yield came, data


def run(traffic: Traffic) -> Traced:
    """Send all of it, then read what came."""
    clients = Clients(traffic)
    gc.collect()
    gc.disable()  # for so short a life
    before = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exchanged = runner.run(clients.run())
    cpu = time.process_time() - before
    start = min(one.due for one in exchanged)
    answers = [answer(*pair, start) for pair in zip(traffic.exchanges, exchanged, strict=True)]
    return Traced(answers=answers, cpu_seconds=cpu)


if __name__ == "__main__":
    program(Traffic, run)
