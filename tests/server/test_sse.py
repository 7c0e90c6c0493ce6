"""A stream of events on its own: when its status is sent, what silence, errors, deadlines and hanging up do."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.async_engine import EngineDied
from octavo.server import errors, sse
from octavo.server.limits import Deadline
from octavo.server.sse import EventStream

Events = Callable[[], AsyncGenerator[bytes, None]]


@dataclass
class Connection:
    """The two ends that a response is given."""

    sent: list[dict[str, Any]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        async with self.told:
            self.sent.append(message)
            self.told.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        async with self.told:
            await self.told.wait_for(true)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]

    @property
    def started(self) -> bool:
        return any(message["type"] == "http.response.start" for message in self.sent)


def serve(
    events: Events, connection: Connection, seconds: float | None = None, queue_seconds: float | None = None
) -> Coroutine[Any, Any, None]:
    response = EventStream(
        events(), lambda error: b"error " + error.kind.encode(), Deadline(seconds), {"x-more": "1"}, queue_seconds
    )
    return response({"type": "http"}, connection.receive, connection.send)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_events_and_headers() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    async def work() -> None:
        connection = Connection()
        await serve(events, connection)
        headers = dict(connection.sent[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert (headers[b"x-more"], headers[b"cache-control"]) == (b"1", b"no-cache")
        assert b"content-length" not in headers
        assert connection.bodies == [b"one", b"two", b""]
        assert connection.sent[-1]["more_body"] is False

    run(work())


@pytest.mark.parametrize("error", [errors.overloaded(1), EngineDied("gone"), ZeroDivisionError()])
def test_an_error_before_the_first_event_is_a_status(error: Exception) -> None:
    connection = Connection()

    async def events() -> AsyncGenerator[bytes, None]:
        if connection.started:
            yield b""
        raise error

    async def work() -> None:
        expected = type(error) if errors.of_engine(error) is None else errors.ApiError
        with pytest.raises(expected):
            await serve(events, connection)
        assert not connection.sent

    run(work())


@pytest.mark.parametrize(
    ("error", "kind"),
    [(errors.failed("x"), b"generation"), (EngineDied("x"), b"engine_died"), (ZeroDivisionError(), b"internal")],
)
def test_a_later_error_is_an_event(error: Exception, kind: bytes) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise error

    async def work() -> None:
        connection = Connection()
        await serve(events, connection)
        assert connection.bodies == [b"one", b"error " + kind, b""]

    run(work())


def test_who_may_still_be_turned_away_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.0)

    async def work() -> None:
        async def events() -> AsyncGenerator[bytes, None]:
            for _ in range(100):
                await asyncio.sleep(0)
            yield b"one"

        connection = Connection()
        await serve(events, connection, queue_seconds=3600)
        assert connection.bodies[0] == b"one"

    run(work())


def test_silence_is_filled_and_sends_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.001)

    async def work() -> None:
        go = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            await go.wait()
            yield b"one"
            raise errors.failed("late")

        connection = Connection()
        task = asyncio.create_task(serve(events, connection))
        await connection.until(lambda: len(connection.bodies) >= 3)
        assert connection.started
        go.set()
        await task
        comments = connection.bodies.index(b"one")
        assert connection.bodies[:comments] == [b": keep-alive\n\n"] * comments
        assert connection.bodies[-2:] == [b"error generation", b""]

    run(work())


@pytest.mark.parametrize("at", ["before the first event", "between events", "while sending"])
def test_hanging_up_closes_the_events(at: str) -> None:
    async def work() -> None:
        closed, reached = asyncio.Event(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                if at != "before the first event":
                    yield b"one"
                reached.set()
                if at == "while sending":
                    yield b"stuck"
                await asyncio.Event().wait()
            finally:
                closed.set()

        connection = Connection()
        send = connection.send

        async def stuck(message: Any) -> None:
            await send(message)
            if message.get("body") == b"stuck":
                await asyncio.Event().wait()

        connection.send = stuck  # type: ignore[method-assign]
        task = asyncio.create_task(serve(events, connection))
        await reached.wait()
        connection.gone.set()
        await task
        assert closed.is_set()

    run(work())


def test_the_deadline_closes_the_events_of_a_client_that_does_not_read() -> None:
    """Its connection takes nothing more, not even the error; what the events hold is free all the same."""

    async def work() -> None:
        closed = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                while True:
                    yield b"one"
            finally:
                closed.set()

        connection = Connection()

        async def full(message: Any) -> None:
            await asyncio.Event().wait()

        connection.send = full  # type: ignore[method-assign]
        task = asyncio.create_task(serve(events, connection, seconds=0.01))
        await closed.wait()
        assert not task.done()
        connection.gone.set()
        await task

    run(work())


@pytest.mark.parametrize("begun", [False, True])
def test_the_deadline_closes_the_events(begun: bool) -> None:
    async def work() -> None:
        closed = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                if begun:
                    yield b"one"
                await asyncio.Event().wait()
            finally:
                closed.set()

        connection = Connection()
        if begun:
            await serve(events, connection, seconds=0.05)
            assert connection.bodies == [b"one", b"error timeout", b""]
        else:
            with pytest.raises(errors.ApiError) as caught:
                await serve(events, connection, seconds=0.001)
            assert (caught.value.status_code, connection.sent) == (504, [])
        assert closed.is_set()

    run(work())
