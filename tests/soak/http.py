"""HTTP by hand, so that a client can do with its connection what no library would: leave, stall, break off."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

RECEIVE_BYTES = 4096
"""Of the kernel's buffer: a client that does not read is soon one that takes nothing."""


@dataclass
class Response:
    """What a server answers, its body still to come."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises asyncio.IncompleteReadError where it breaks off."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def whole(self) -> bytes:
        """The body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[Any]:
        """The JSON of each event of a stream; None for the [DONE] of OpenAI's."""
        async for piece in self.pieces():
            for line in piece.splitlines():
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    yield None if data == b"[DONE]" else json.loads(data)


@dataclass
class Connection:
    """A client's end, for one request."""

    port: int
    key: str
    bytes_sent: int = 0
    _writer: asyncio.StreamWriter | None = field(default=None, repr=False)
    _reader: asyncio.StreamReader | None = field(default=None, repr=False)

    async def __aenter__(self) -> Connection:
        end = socket.socket()
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", self.port))
            self._reader, self._writer = await asyncio.open_connection(sock=end, limit=RECEIVE_BYTES)
        except BaseException:
            end.close()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.leave()

    def leave(self, *, reset: bool = False) -> None:
        """Go; with a reset the kernel tells the server at once, and drops what is on its way."""
        if self._writer is None:
            return
        if reset:
            end: socket.socket = self._writer.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()
        self._writer = None

    async def send(self, data: bytes) -> None:
        """Bytes, whatever they are."""
        assert self._writer is not None
        self._writer.write(data)
        await self._writer.drain()

    async def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] = {}, length: int | None = None
    ) -> None:
        """A request; a body that is no bytes is sent as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [
            f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json",
            f"Authorization: Bearer {self.key}", f"Content-Length: {len(data) if length is None else length}",
            *(f"{one}: {headers[one]}" for one in headers),
        ]  # fmt: skip
        await self.send("\r\n".join([*lines, "", ""]).encode() + data)

    async def response(self) -> Response:
        """The status and the headers of what comes back. Raises asyncio.IncompleteReadError where nothing does."""
        assert self._reader is not None
        first = (await self._reader.readuntil(b"\r\n")).decode()
        headers = {}
        while (line := await self._reader.readuntil(b"\r\n")) != b"\r\n":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return Response(int(first.split()[1]), headers, self._reader)
