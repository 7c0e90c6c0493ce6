"""A connection's own end: what the server's protocol gives the application beside what ASGI says."""

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from octavo.server.protocol import SEND_BODY, Protocol

REQUEST = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"


class Wire(asyncio.Transport):
    """What was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...


def test_bodies_go_past_what_is_around_send() -> None:
    """Of each of two requests that came at once to its own response."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        around: list[str] = []

        async def watched(message: Any) -> None:
            around.append(message["type"])
            await send(message)

        await watched({"type": "http.response.start", "status": 200, "headers": []})
        direct = scope["extensions"][SEND_BODY]["send"]()
        await direct({"type": "http.response.body", "body": scope["path"].encode(), "more_body": True})
        await direct({"type": "http.response.body", "body": b"", "more_body": False})
        assert around == ["http.response.start"]

    async def work() -> bytes:
        config = uvicorn.Config(app, http=Protocol, lifespan="off", server_header=False, date_header=False)
        config.load()
        wire, protocol = Wire(), Protocol(config, ServerState(), {}, asyncio.get_running_loop())
        protocol.connection_made(wire)
        protocol.data_received(REQUEST % 1 + REQUEST % 2)
        while protocol.tasks:
            await asyncio.gather(*protocol.tasks)
        protocol.connection_lost(None)
        return wire.written

    head, chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"2\r\n/%d\r\n0\r\n\r\n"
    assert asyncio.run(work()) == head + chunks % 1 + head + chunks % 2
