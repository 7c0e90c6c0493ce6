"""`octavo serve` as a benchmark starts it."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.job import EngineFailed, command

START_SECONDS = 600.0
STOP_SECONDS = 60.0
_ASK_AGAIN_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers."""

    url: str
    process_id: int | None = None
    """Of the process that speaks HTTP; None for a server that somebody else has started."""

    def get(self, path: str, api_key: str | None = None) -> Any:
        """A route's JSON. Raises EngineFailed, with the address, where it gives none."""
        request = urllib.request.Request(f"{self.url.rstrip('/')}{path}")
        if api_key:
            request.add_header("Authorization", f"Bearer {api_key}")
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return msgspec.json.decode(response.read())
        except (OSError, ValueError) as error:
            raise EngineFailed(f"{request.full_url}: {error}") from None

    def cpu_seconds(self) -> float | None:
        """Processor time of the process so far; None where that is not known."""
        status = Path(f"/proc/{self.process_id}/stat")
        if self.process_id is None or not status.exists():
            return None
        fields = status.read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def octavo_serve(arguments: Sequence[str], *, threads: int | None = None, path: Path | None = None) -> Iterator[Server]:
    """`octavo serve` with these arguments, until the end of the context. Raises EngineFailed with what it said."""
    port = _free_port()
    words = [*command("octavo.cli", threads=threads, path=path), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*words, *arguments], stdout=subprocess.DEVNULL, stderr=log)
        try:
            server = Server(f"http://127.0.0.1:{port}", process.pid)
            if not _is_there(server, process):
                log.seek(0)
                raise EngineFailed(f"octavo serve did not start:\n{log.read().strip()}")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_there(server: Server, process: subprocess.Popen[bytes]) -> bool:
    ends = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < ends:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=30).close()
            return True
        except OSError:
            time.sleep(_ASK_AGAIN_SECONDS)
    return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
