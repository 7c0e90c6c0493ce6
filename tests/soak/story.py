"""What happens to the server from its start to its two ends, and what is found."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.clients import PATIENCE, Clients
from tests.soak.http import Connection
from tests.soak.known import Known, learn, texts
from tests.soak.memory import Memory
from tests.soak.served import KEYS, MODEL_ARGUMENTS, PLACES, Held, Served, held, served

KNOWN = 80
SAMPLE_SECONDS = 2.0
KILLING = 0.6
"""Of the time: in the rest no engine is killed, so that its memory can be followed."""
KILL_SECONDS = (10.0, 40.0)
STREAMS = 6
"""That run when the server is told to end."""


@dataclass
class Story:
    """One soak."""

    model: str
    log: Path
    seconds: float
    seed: int
    count: int
    say: Callable[..., None]
    faults: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    found: dict[str, Any] = field(default_factory=dict)
    _clients: Clients | None = None
    _server: Served | None = None

    async def run(self) -> None:
        """All of it."""
        chance = random.Random(self.seed)
        more = MODEL_ARGUMENTS if self.model.endswith("llama") else ()
        async with served(self.model, self.log, *more) as server:
            self._server = server
            known = await learn(server, chance, KNOWN)
            self._clients = Clients(server, known, chance, self.count)
            await asyncio.gather(*(_short(server) for _ in range(PLACES)))  # all that starts with the first requests
            before = await _settled(server, 0)
            await self._soak(server, self._clients)
            await self._nothing_is_left(server, before)
            await self._one_signal(server, known)
        async with served(self.model, self.log, *more) as server:
            await self._two_signals(server, known)
        self.memory.judge(self.faults)

    def result(self) -> dict[str, Any]:
        """What is known so far."""
        clients, server = self._clients, self._server
        tally = sorted(clients.tally.items()) if clients is not None else []
        return {
            "requests": sum(count for _, count in tally),
            "outcomes": {f"{kind}: {outcome}": count for (kind, outcome), count in tally},
            "engine_deaths": len(server.deaths) if server is not None else 0,
            **self.found,
            "memory": self.memory.result(),
            "faults": [*self.faults, *(clients.faults if clients is not None else [])],
        }

    async def _soak(self, server: Served, clients: Clients) -> None:
        running = asyncio.create_task(clients.run())
        others = [asyncio.create_task(self._watch(server, clients)), asyncio.create_task(self._kill(server))]
        try:
            await asyncio.wait([running, *others], timeout=self.seconds, return_when=asyncio.FIRST_EXCEPTION)
            clients.stopping = True
            _, forgotten = await asyncio.wait([running], timeout=2 * PATIENCE)
            if forgotten:
                self.faults.append("clients wait for ever")
            for task in others:
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    self.faults.append(f"the soak ended early: {error!r}")
        finally:
            for task in [running, *others]:
                task.cancel()
            await asyncio.gather(running, *others, return_exceptions=True)
        self.faults += clients.faults
        clients.faults = []

    async def _kill(self, server: Served) -> None:
        """At random times; its own, so that the clients' dice are the same without it."""
        chance = random.Random(self.seed + 1)
        ends = time.monotonic() + KILLING * self.seconds
        shortest = min(KILL_SECONDS[0], self.seconds / 8)
        while True:
            await asyncio.sleep(chance.uniform(shortest, max(shortest, min(KILL_SECONDS[1], self.seconds / 4))))
            if time.monotonic() > ends:
                return
            await server.kill_engine(chance)

    async def _watch(self, server: Served, clients: Clients) -> None:
        began = told = time.monotonic()
        while True:
            engine = await server.engine_process()
            with suppress(OSError):  # it has just died
                self.memory.add(time.monotonic() - began, held(server.process.pid), engine, held(engine))
            if time.monotonic() - told >= 60:
                told += 60
                requests, faults = sum(clients.tally.values()), len(clients.faults)
                minutes, deaths = (told - began) / 60, len(server.deaths)
                self.say(
                    f"{minutes:.0f} min: {requests} requests, {faults} faults, {deaths} deaths, {self.memory.last()}"
                )
            await asyncio.sleep(SAMPLE_SECONDS)

    # When all clients have gone

    async def _nothing_is_left(self, server: Served, before: Held) -> None:
        await server.until_healthy()
        info = (await server.get("/info"))[1]
        total = info["max_batch_total_tokens"] // info["block_size"]
        async with asyncio.timeout(PATIENCE):
            while (left := await _left(server, total)) and left["unfinished"]:
                await asyncio.sleep(0.1)
        if left["lost"]:
            self.faults.append(f"{left['lost']} blocks are lost: {left}")
        statuses = await asyncio.gather(*(_short(server) for _ in range(PLACES)))
        if set(statuses) != {200}:
            self.faults.append(f"not all places are free: {statuses}")
        now = await _settled(server, before.descriptors)
        if now.descriptors > before.descriptors or now.threads > before.threads:
            self.faults.append(f"descriptors and threads: {before.descriptors, before.threads} before, {now} now")
        self.found["left"] = left | {
            "descriptors": now.descriptors, "descriptors_before": before.descriptors,
            "threads": now.threads, "threads_before": before.threads,
        }  # fmt: skip

    async def _one_signal(self, server: Served, known: list[Known]) -> None:
        """Those that run are answered, nothing new is taken, the status is 0."""
        longest = sorted(known, key=lambda one: -len(one.text))[:STREAMS]
        begun = [asyncio.Event() for _ in longest]
        reading = [asyncio.create_task(_stream(server, *pair)) for pair in zip(longest, begun, strict=True)]
        await asyncio.gather(*(one.wait() for one in begun))
        server.process.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*reading, return_exceptions=True)
        wrong = [repr(found) for one, found in zip(longest, answers, strict=True) if found != one.text]
        if wrong:
            self.faults.append(f"answers that ran at SIGTERM: {wrong}")
        status = await asyncio.wait_for(server.process.wait(), PATIENCE)
        if status:
            self.faults.append(f"SIGTERM: exit status {status}")
        self.found["sigterm"] = {"status": status, "answered": len(longest) - len(wrong)}

    async def _two_signals(self, server: Served, known: list[Known]) -> None:
        """What runs is cut off."""
        longest = max(known, key=lambda one: len(one.text))
        begun = asyncio.Event()
        reading = asyncio.create_task(_stream(server, longest, begun, stop=True))
        await begun.wait()
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            while await server.is_healthy():
                pass
        server.process.send_signal(signal.SIGTERM)
        at = time.monotonic()
        status = await asyncio.wait_for(server.process.wait(), PATIENCE)
        seconds = time.monotonic() - at
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        if status != 1 or seconds > 20:
            self.faults.append(f"a second SIGTERM: exit status {status} after {seconds:.1f} s")
        self.found["second_sigterm"] = {"status": status, "seconds": round(seconds, 2)}


async def _left(server: Served, total: int) -> dict[str, float]:
    now = await server.metrics()
    blocks = {state: now[f'octavo_blocks{{state="{state}"}}'] for state in ("free", "cached", "held")}
    unfinished = now["tgi_queue_size"] + now["tgi_batch_current_size"] + blocks["held"]
    return {"unfinished": unfinished, "lost": total - sum(blocks.values()), "blocks": total, **blocks}


async def _settled(server: Served, wanted: int) -> Held:
    """The least number of descriptors within seconds: connections are closed a moment after their last byte."""
    least = held(server.process.pid)
    for _ in range(30):
        if least.descriptors <= wanted:
            break
        await asyncio.sleep(0.1)
        least = min(least, held(server.process.pid), key=lambda one: one.descriptors)
    return least


async def _short(server: Served) -> int:
    async with Connection(server.port, KEYS[1]) as connection:
        await connection.ask("POST", "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 40}})
        response = await connection.response()
        await response.whole()
    return response.status


async def _stream(server: Served, one: Known, begun: asyncio.Event, *, stop: bool = False) -> str:
    """Its text; with `stop` nothing is read behind the first token."""
    path, body = one.asked(stream=True)
    async with Connection(server.port, KEYS[0]) as connection:
        await connection.ask("POST", path, body)
        response = await connection.response()
        found = ""
        async for text in texts(response.events()):
            begun.set()
            found += text
            if stop:
                await asyncio.Event().wait()
    return found
