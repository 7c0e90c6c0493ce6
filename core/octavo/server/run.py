"""A server from its start to its end: socket, engine, HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop

from octavo.async_engine import AsyncEngine
from octavo.settings import Settings, SettingsError
from octavo.settled import settle

if TYPE_CHECKING:
    from octavo.server.http import Server

logger = logging.getLogger(__name__)

STALLED_SECONDS = 120.0
"""After which a client is gone that takes nothing of what it was sent, or whose machine does not answer."""


Visit = Callable[[str], bool]
"""A first client, in a thread: it gets the server's address and says whether to go on serving."""


def serve(settings: Settings, visit: Visit | None = None) -> int:
    """Serve until a signal; returns the exit status: 0 when every request was answered or told why not.

    `visit` is called once the server answers; if it raises, the status is 1. Raises SettingsError, or EngineFailed with
    the reason why the model cannot be served.
    """
    with _bound(settings) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings, listener, visit))


def _bound(settings: Settings) -> socket.socket:
    """The address is taken before the model is read: a port in use is told at once."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise SettingsError(f"host is {settings.host} and port {settings.port}: {error.strerror or error}") from None
    _let_go_of_the_dead(listener)
    return listener


def _let_go_of_the_dead(listener: socket.socket) -> None:
    """A client whose machine went without a word holds its place as long as the kernel takes it for alive."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_USER_TIMEOUT", int(1000 * STALLED_SECONDS)):
        if (option := getattr(socket, name, None)) is not None:  # what the system has of them; connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, option, value)


async def _serve(settings: Settings, listener: socket.socket, visit: Visit | None) -> int:
    engine, make = await _started(settings)
    try:
        server = make(engine, settings)
        address = listener.getsockname()
        logger.info("%s on %s, at %s", engine.info.model, engine.info.backend, _url(*address[:2]))
        settle()
        visiting = asyncio.create_task(_visited(server, visit, _url(*address[:2])))
        await server.serve(sockets=[listener])
        if server.force_exit:  # there is no time to ask the engine's process
            await engine.close(0)
        await server.drained()
        return 1 if server.force_exit or not await visiting else 0
    finally:
        await engine.close()


async def _started(settings: Settings) -> tuple[AsyncEngine, type[Server]]:
    """The engine's process takes longest, so it begins first; what HTTP needs is imported meanwhile."""
    logger.info("starting the engine for %s", settings.model_id or "demo")
    starting = asyncio.create_task(AsyncEngine.start(settings))
    try:
        server = await asyncio.to_thread(_server)
    except BaseException:
        starting.cancel()
        for engine in await asyncio.gather(starting, return_exceptions=True):
            if isinstance(engine, AsyncEngine):
                await engine.close()
        raise
    return await starting, server


def _server() -> type[Server]:
    from octavo.server.http import Server

    return Server


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _visited(server: Server, visit: Visit | None, url: str) -> bool:
    """Let the first client in, and end the server if it says so; False if it has failed."""
    if visit is None:
        return True
    try:
        go_on, fine = await asyncio.to_thread(visit, url), True
    except Exception as error:
        logger.error("%s: %s", type(error).__name__, error)
        go_on = fine = False
    if not (go_on or server.should_exit):
        server.stop()
    return fine
