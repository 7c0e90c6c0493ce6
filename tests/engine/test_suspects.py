"""Who is to blame when the engine's process ends, and who has to wait for whom."""

import asyncio
from collections.abc import Callable

import pytest

from octavo.engine.suspects import RequestPoisoned, Suspects

POISON = b"poison"


def entered(suspects: Suspects, requests: list[bytes]) -> list[asyncio.Task[Callable[[], None]]]:
    return [asyncio.create_task(suspects.enter(one)) for one in requests]


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_second_death_is_the_last() -> None:
    async def run() -> None:
        suspects = Suspects()
        for _ in range(2):
            (await suspects.enter(POISON))()
            suspects.blame({POISON: False})
        with pytest.raises(RequestPoisoned, match="2 times"):
            await suspects.enter(POISON)
        (await suspects.enter(b"another"))()

    asyncio.run(run())


def test_an_answer_clears_a_request() -> None:
    async def run() -> None:
        suspects = Suspects()
        for _ in range(3):
            (await suspects.enter(POISON))()
            suspects.blame({POISON: False})
            suspects.acquit(POISON)
        (await suspects.enter(POISON))()

    asyncio.run(run())


def test_suspects_enter_one_by_one_and_those_that_were_answered_are_not_blamed_again() -> None:
    """Of twenty that come again together, the deadly one alone is refused, whichever it is."""

    async def run(place: int) -> None:
        suspects, others = Suspects(), [b"%d" % number for number in range(19)]
        requests = [*others[:place], POISON, *others[place:]]
        suspects.blame(dict.fromkeys(requests, False))
        tasks = entered(suspects, requests)
        await settle()
        running: dict[bytes, bool] = {}
        for request, task in zip(requests, tasks, strict=True):
            assert [one.done() for one in tasks].count(True) == len(running) + 1
            leave = await task
            running[request] = request != POISON
            if request == POISON:
                suspects.blame(running)
            leave()
            leave()
            await settle()
            if request == POISON:
                break
        for task in tasks[place + 1 :]:
            (await task)()
        with pytest.raises(RequestPoisoned):
            await suspects.enter(POISON)
        for other in others:
            (await suspects.enter(other))()

    for place in (0, 7, 19):
        asyncio.run(run(place))


def test_one_that_is_found_out_while_it_waits_is_refused_and_lets_others_in() -> None:
    async def run() -> None:
        suspects = Suspects()
        suspects.blame({POISON: False, b"other": False})
        first, again, other = entered(suspects, [POISON, POISON, b"other"])
        await settle()
        assert (first.done(), again.done(), other.done()) == (True, False, False)
        suspects.blame({POISON: False})
        (await first)()
        with pytest.raises(RequestPoisoned):
            await again
        (await other)()

    asyncio.run(run())


def test_those_that_are_no_suspects_wait_for_nobody() -> None:
    async def run() -> None:
        suspects = Suspects()
        suspects.blame({POISON: False})
        await suspects.enter(POISON)
        for number in range(5):
            await suspects.enter(b"%d" % number)

    asyncio.run(run())


def test_when_all_had_tokens_all_are_blamed() -> None:
    """Which of them it was cannot be told."""

    async def run() -> None:
        suspects = Suspects()
        for _ in range(2):
            suspects.blame({b"a": True, b"b": True})
        for one in (b"a", b"b"):
            with pytest.raises(RequestPoisoned):
                await suspects.enter(one)

    asyncio.run(run())
