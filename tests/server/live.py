"""A server in this process, in a thread with a loop of its own, and its engine in another process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from octavo.async_engine import AsyncEngine
from octavo.server.http import Server
from octavo.server.service import Service
from octavo.settings import Settings

ORIGIN = "https://pages.example"
"""Whose pages may call the server with tight limits."""


@dataclass
class Live:
    """A server that answers."""

    url: str
    http: Server
    thread: threading.Thread
    service: Service
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something in the server's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)

    def held(self) -> tuple[int, int]:
        """Blocks in use, and requests in the engine."""
        stats = self.run(self.service.engine.stats())
        return stats.blocks_held, stats.running + stats.waiting


def until(true: Callable[[], bool]) -> None:
    """Ask again and again; each question takes the server or its engine a moment."""
    ends = time.monotonic() + 120
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.005)  # leaves the core to those who are asked; it is not what makes the answer come true


def key(name: str) -> dict[str, str]:
    """The header that brings it."""
    return {"Authorization": f"Bearer {name}"}


def hung(server: Live, route: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has asked, and reads nothing."""
    connection = connect(server)
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    connection.sendall(f"{head}Authorization: Bearer first-key\r\n\r\n".encode() + data)
    return connection


def connect(server: Live) -> socket.socket:
    """A bare connection to it."""
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), 120)


@contextmanager
def live(model: Path, **settings: Any) -> Iterator[Live]:
    """Serve a model until the end of the context."""
    chosen = Settings(
        model_id=str(model),
        **{"host": "127.0.0.1", "port": 0, "device": "cpu", "max_batch_total_tokens": 8192} | settings,
    )
    listener = socket.create_server((chosen.host, chosen.port))
    ready: list[Live | BaseException] = []
    told = threading.Event()
    servers: list[Server] = []

    async def serve() -> None:
        engine = await AsyncEngine.start(chosen)
        try:
            server = Server(engine, chosen)
            servers.append(server)
            port = listener.getsockname()[1]
            service: Service = server.config.app.state.service  # type: ignore[union-attr]
            ready.append(Live(f"http://127.0.0.1:{port}", server, thread, service, asyncio.get_running_loop()))
            told.set()
            await server.serve(sockets=[listener])
        finally:
            await engine.close()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as error:
            ready.append(error)
            told.set()
            raise

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert told.wait(300)
        first = ready[0]
        if isinstance(first, BaseException):
            raise first
        yield first
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(60)
        listener.close()
