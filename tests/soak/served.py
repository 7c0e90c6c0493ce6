"""The server that is soaked: `octavo serve` in a process of its own, what it holds, and the deaths of its engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.soak.http import Connection

KEYS = ("first", "second")
PLACES = 24
PAYLOAD_LIMIT = 20_000
TOTAL_TOKENS = 512
MODEL_ARGUMENTS = (
    "--max-total-tokens", str(TOTAL_TOKENS), "--max-batch-total-tokens", "3072", "--block-size", "16",
    "--max-batch-prefill-tokens", "128",
)  # fmt: skip
"""A cache in which not all that may run have room: requests are preempted, prefixes are evicted."""
ARGUMENTS = (
    "--host", "127.0.0.1", "--device", "cpu", "--api-key", ",".join(KEYS), "--max-concurrent-requests", str(PLACES),
    "--max-batch-size", "12", "--max-queue-seconds", "20", "--payload-limit", str(PAYLOAD_LIMIT),
    "--engine-restart-seconds", "0.2", "--engine-restarts", "100", "--graceful-termination-timeout", "60",
    "--json-output",
)  # fmt: skip
START_SECONDS = 120.0


class Held(NamedTuple):
    """What a process has of the system's."""

    megabytes: float
    descriptors: int
    threads: int


def held(process_id: int) -> Held:
    """Of a process that lives. Raises OSError for any other."""
    status = Path(f"/proc/{process_id}/status").read_text(encoding="ascii", errors="replace")
    values = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    if "VmRSS" not in values:
        raise ProcessLookupError(process_id)
    return Held(int(values["VmRSS"]) / 1024, len(os.listdir(f"/proc/{process_id}/fd")), int(values["Threads"]))


@dataclass
class Death:
    """Of the engine's process."""

    at: float
    by: str
    healthy_at: float | None = None


@dataclass
class Served:
    """A running server."""

    process: Process
    port: int
    log: Path
    deaths: list[Death] = field(default_factory=list)

    async def get(self, path: str) -> tuple[int, Any]:
        """The status and the JSON of a route, or its text."""
        async with asyncio.timeout(30), Connection(self.port, KEYS[0]) as connection:
            await connection.ask("GET", path)
            response = await connection.response()
            body = await response.whole()
        return response.status, json.loads(body) if body.startswith(b"{") else body.decode()

    async def is_healthy(self) -> bool:
        """Does it say so?"""
        try:
            return (await self.get("/health"))[0] == 200
        except OSError:
            return False

    async def until_healthy(self) -> None:
        """Raises TimeoutError, or RuntimeError if it has ended."""
        async with asyncio.timeout(START_SECONDS):
            while not await self.is_healthy():
                if self.process.returncode is not None:
                    raise RuntimeError(f"the server has ended: {self.log.read_text(encoding='utf-8')[-2000:]}")
                await asyncio.sleep(0.05)

    async def engine_process(self) -> int:
        """Its id; the last one's while none is there."""
        status, info = await self.get("/info")
        assert status == 200, info
        process: int = info["engine_process_id"]
        return process

    async def kill_engine(self, chance: random.Random) -> None:
        """End it, and wait until another one serves."""
        number = chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
        process = await self.engine_process()
        death = Death(time.monotonic(), number.name)
        self.deaths.append(death)
        os.kill(process, number)
        async with asyncio.timeout(START_SECONDS):
            while not await self.is_healthy() or await self.engine_process() == process:
                await asyncio.sleep(0.05)
        death.healthy_at = time.monotonic()

    def was_down(self, since: float) -> bool:
        """Was there no engine at any time from then to now? A little longer: requests wait for each other."""
        return any((death.healthy_at or time.monotonic()) + 1 >= since for death in self.deaths)

    async def metrics(self) -> dict[str, float]:
        """By name and labels."""
        status, text = await self.get("/metrics")
        assert status == 200, text
        return {name: float(value) for name, value in re.findall(r"^(\w\S*) (\S+)$", text, re.MULTILINE)}


@asynccontextmanager
async def served(model: str, log: Path, *more: str) -> AsyncIterator[Served]:
    """A server that is healthy, until the end of the context."""
    port = _free_port()
    code = "from octavo.cli import main; main()"
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, "serve", model, "--port", str(port), *ARGUMENTS, *more,
            stdout=asyncio.subprocess.DEVNULL, stderr=file, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
    try:
        one = Served(process, port, log)
        await one.until_healthy()
        yield one
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
