"""Clients of every kind, and what each may be told: anything else is a fault."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.soak.http import Connection, Response
from tests.soak.known import MOST_TOKENS, Known, Told, number, texts
from tests.soak.served import KEYS, PLACES, Served
from tests.soak.too_much import TOO_MUCH

PATIENCE = 120.0
"""Seconds after which a request was forgotten."""
MOST_FAULTS = 50
_LATER = ("overloaded", "queue_timeout")


class Fault(Exception):
    """The server did what it may not."""


@dataclass
class Clients:
    """All of them: they go on until they are told to stop."""

    server: Served
    known: list[Known]
    chance: random.Random
    count: int = 16
    tally: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many of each kind ended in which way."""
    faults: list[str] = field(default_factory=list)
    stopping: bool = False

    async def run(self) -> None:
        """Until `stopping`, and until the last of them has its answer."""
        await asyncio.gather(*(self._run_one() for _ in range(self.count)))

    async def _run_one(self) -> None:
        kinds, weights = zip(*_KINDS.items(), strict=True)
        while not self.stopping:
            (kind,) = self.chance.choices(kinds, weights)
            await self.act(kind)

    async def act(self, kind: Callable[[Clients], Awaitable[str]]) -> None:
        """One request, or a burst, and how it ended."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                outcome = await kind(self)
        except TimeoutError:
            outcome = self._fault(kind, f"no answer within {PATIENCE:g} s")
        except (Fault, AssertionError) as error:
            outcome = self._fault(kind, str(error))
        except (OSError, asyncio.IncompleteReadError) as error:
            outcome = self._fault(kind, f"the connection broke off after {time.monotonic() - began:.3f} s: {error!r}")
        except Exception as error:
            outcome = self._fault(kind, f"what came back could not be read: {error!r}")
        self.tally[kind.__name__, outcome] += 1

    def _fault(self, kind: Callable[..., object], message: str) -> str:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(f"{kind.__name__}: {message}")
        return "FAULT"

    def connect(self) -> Connection:
        """As one of those who have a key."""
        return Connection(self.server.port, self.chance.choice(KEYS))

    async def refused(self, response: Response, since: float, body: bytes | None = None) -> str:
        """How a request that is right may fail."""
        kind, message = told(json.loads(await response.whole() if body is None else body))
        if response.status == 429 and kind in _LATER and response.headers.get("retry-after") == "1":
            return f"429 {kind}"
        if response.status == 503 and kind == "engine_died" and self.server.was_down(since):
            await asyncio.sleep(self.chance.random() * int(response.headers["retry-after"]))
            return "503 engine_died"
        if response.status == 422 and "ended 2 times while it had this request" in message:
            return "422 was there at two deaths"
        raise Fault(f"{response.status} {kind}: {message}")

    def broken(self, error: Told, since: float) -> str:
        """How a stream may."""
        if error.kind == "engine_died" and self.server.was_down(since):
            return "event engine_died"
        raise Fault(f"the stream ended with {error.kind}")


def told(body: Any) -> tuple[str, str]:
    """Kind and message of an error."""
    error = body["error"]
    return (error["code"], error["message"]) if isinstance(error, dict) else (body["error_type"], error)


async def complete(clients: Clients) -> str:
    """A request whose answer is known."""
    return await _complete(clients, clients.chance.choice(clients.known), stream=clients.chance.random() < 0.5)


async def _complete(clients: Clients, one: Known, *, stream: bool, stall: bool = False) -> str:
    began = time.monotonic()
    path, body = one.asked(stream=stream)
    async with clients.connect() as connection:
        await connection.ask("POST", path, body)
        response = await connection.response()
        if response.status != 200:
            return await clients.refused(response, began)
        if not stream:
            return _right(one, _text(json.loads(await response.whole())))
        found, stall_at = "", clients.chance.randrange(1, 30) if stall else -1
        try:
            number = 0
            async for text in texts(response.events()):
                found += text
                number += 1
                if number == stall_at:
                    await asyncio.sleep(clients.chance.uniform(0.5, 4))
                    if clients.chance.random() < 0.3:
                        connection.leave(reset=True)
                        return "left"
        except Told as error:
            if not one.text.startswith(found):
                raise Fault(f"{found!r} is no beginning of {one.text!r}") from None
            return clients.broken(error, began)
        return _right(one, found)


def _text(answer: Any) -> str:
    if "generated_text" in answer:
        return str(answer["generated_text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _right(one: Known, found: str) -> str:
    if found != one.text:
        raise Fault(f"{found!r} instead of {one.text!r}")
    return "answered rightly"


async def stall(clients: Clients) -> str:
    """A stream that is not read for seconds, and then to its end, or left."""
    one = clients.chance.choice([one for one in clients.known if len(one.text) > 100])
    if one.path == "/generate":
        one = Known(one.path, one.body | {"parameters": one.body["parameters"] | {"top_n_tokens": 5}}, one.text)
    elif one.path == "/v1/completions":
        one = Known(one.path, one.body | {"logprobs": 5}, one.text)
    return await _complete(clients, one, stream=True, stall=True)


async def cancel(clients: Clients) -> str:
    """Goes at any point: as soon as it has asked, in the queue, in the prompt, while tokens come."""
    chance, stream = clients.chance, clients.chance.random() < 0.7
    several = chance.random() < 0.5
    prompt = f"{number(chance)} " * chance.choice([1, 1, 15])
    body = {"prompt": prompt, "max_tokens": MOST_TOKENS, "n": 1 + several, "stream": stream, "seed": 1}
    point = chance.choice(["at once", "in the middle", "while tokens come"])
    began = time.monotonic()
    async with clients.connect() as connection:
        await connection.ask("POST", "/v1/completions", body)
        if point == "in the middle":
            await asyncio.sleep(chance.expovariate(5))
        elif point == "while tokens come" and stream:
            response = await connection.response()
            if response.status != 200:
                return await clients.refused(response, began)
            left = chance.randrange(1, MOST_TOKENS)
            try:
                async for _ in texts(response.events()):
                    left -= 1
                    if not left:
                        break
            except Told as error:
                return clients.broken(error, began)
        connection.leave(reset=chance.random() < 0.5)
    return f"left {point}"


async def several(clients: Clients) -> str:
    """Two prompts, two answers to each, drawn."""
    began, stream = time.monotonic(), clients.chance.random() < 0.5
    body = {"prompt": ["page", f"{number(clients.chance)}"], "n": 2, "max_tokens": 30, "stream": stream}
    async with clients.connect() as connection:
        await connection.ask("POST", "/v1/completions", body)
        response = await connection.response()
        if response.status != 200:
            return await clients.refused(response, began)
        if not stream:
            ends = [choice["finish_reason"] for choice in json.loads(await response.whole())["choices"]]
        else:
            ends = []
            async for event in response.events():
                if event is not None and "error" in event:
                    return clients.broken(Told(told(event)[0]), began)
                ends += [] if event is None else [choice["finish_reason"] for choice in event["choices"]]
    ends = [end for end in ends if end is not None]
    if len(ends) != 4 or not set(ends) <= {"length", "stop"}:
        raise Fault(f"finish reasons {ends}")
    return "answered"


async def deadline(clients: Clients) -> str:
    """Has little time, which may be enough."""
    began, stream = time.monotonic(), clients.chance.random() < 0.5
    one = clients.chance.choice(clients.known)
    path, body = one.asked(stream=stream)
    async with clients.connect() as connection:
        await connection.ask("POST", path, body, {"X-Request-Timeout": f"{clients.chance.uniform(0.001, 1):.4f}"})
        response = await connection.response()
        if response.status == 504:
            kind, message = told(json.loads(await response.whole()))
            assert kind == "timeout", message
            return "504 timeout"
        if response.status != 200:
            return await clients.refused(response, began)
        if not stream:
            return _right(one, _text(json.loads(await response.whole())))
        found = ""
        try:
            async for text in texts(response.events()):
                found += text
        except Told as error:
            assert one.text.startswith(found), f"{found!r} is no beginning of {one.text!r}"
            return "event timeout" if error.kind == "timeout" else clients.broken(error, began)
        return _right(one, found)


async def too_much(clients: Clients) -> str:
    """Asks for what cannot be."""
    began = time.monotonic()
    path, body, status, word = clients.chance.choice(TOO_MUCH)
    async with clients.connect() as connection:
        await connection.ask("POST", path, body)
        response = await connection.response()
        answer = await response.whole()
    if response.status in (429, 503):
        return await clients.refused(response, began, answer)
    if response.status != status or word.encode() not in answer:
        raise Fault(f"{path} {str(body)[:80]}: {response.status} {answer.decode()}, not a {status} with {word}")
    return f"{status} as it should"


async def half(clients: Clients) -> str:
    """Stops in the middle of its request, and goes after a while; or sends what is no HTTP."""
    async with clients.connect() as connection:
        match clients.chance.randrange(3):
            case 0:
                await connection.ask("POST", "/generate", b'{"inputs": "a"', length=100)
            case 1:
                await connection.send(b"POST /generate HTTP/1.1\r\nHost: ")
            case 2:
                await connection.send(bytes(clients.chance.randrange(256) for _ in range(64)) + b"\r\n\r\n")
        await asyncio.sleep(clients.chance.uniform(0, 1))
        connection.leave(reset=clients.chance.random() < 0.5)
    return "left"


async def look(clients: Clients) -> str:
    """What monitors ask."""
    path, began = (
        clients.chance.choice(["/health", "/info", "/metrics", "/v1/models", "/openapi.json"]),
        time.monotonic(),
    )
    status, _ = await clients.server.get(path)
    if path == "/health" and status == 503 and clients.server.was_down(began):
        return "503 unhealthy"
    if status != 200:
        raise Fault(f"{path}: {status}")
    return "200"


async def stranger(clients: Clients) -> str:
    """Has no key."""
    async with Connection(clients.server.port, "nobody's") as connection:
        await connection.ask("POST", "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}})
        status = (await connection.response()).status
    if status != 401:
        raise Fault(f"{status}")
    return "401"


async def burst(clients: Clients) -> str:
    """More at once than there are places."""
    await asyncio.gather(*(clients.act(complete) for _ in range(PLACES + 8)))
    return "sent"


_KINDS: dict[Callable[[Clients], Awaitable[str]], float] = {
    complete: 30, cancel: 20, stall: 6, several: 6, deadline: 10, too_much: 10, half: 6, look: 4, stranger: 2,
    burst: 0.5,
}  # fmt: skip
