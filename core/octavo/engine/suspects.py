"""Requests that were in the engine when its process ended: one that ends it twice is not taken again, others go on.

After a death all requests that were there are suspects. Clients send them again, all at once, and one may be
deadly. So suspects enter one by one: each waits until the one before has its first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from octavo.engine.scheduler import RequestRefused

DEADLY = 2
"""So many deaths, and a request is refused."""
REMEMBERED = 4096
"""Suspects, at most."""


class RequestPoisoned(RequestRefused):
    """The engine's process ended each time it had this request: it is not tried again."""


class Suspects:
    """How often the process ended while it had a request that has not been answered since, by its fingerprint."""

    def __init__(self) -> None:
        self._deaths: dict[bytes, int] = {}
        self._turn = asyncio.Semaphore(1)

    async def enter(self, fingerprint: bytes) -> Callable[[], None]:
        """Wait for one's turn; returns what is to be called when the first token is there, or nothing more comes.

        Raises RequestPoisoned for a request that was there too often.
        """
        if fingerprint not in self._deaths:
            return _nothing
        self._check(fingerprint)
        await self._turn.acquire()
        try:
            self._check(fingerprint)
        except RequestPoisoned:
            self._turn.release()
            raise
        return _once(self._turn.release)

    def _check(self, fingerprint: bytes) -> None:
        if self._deaths.get(fingerprint, 0) >= DEADLY:
            raise RequestPoisoned(
                f"the engine's process ended {DEADLY} times while it had this request, which is not tried again: "
                "change its prompt or its parameters"
            )

    def blame(self, lost: Mapping[bytes, bool]) -> None:
        """The process has ended while it had these; True for those that had a token since they entered.

        A suspect that had none entered last: it is the one, and not those that it took with it once more.
        """
        deadly = {one for one, answered in lost.items() if one in self._deaths and not answered}
        for one in lost:
            if not deadly or one in deadly or one not in self._deaths:
                self._deaths[one] = self._deaths.pop(one, 0) + 1
        for one in list(self._deaths)[:-REMEMBERED]:
            del self._deaths[one]

    def acquit(self, fingerprint: bytes) -> None:
        """It was answered to the end, or refused, and the process lives."""
        self._deaths.pop(fingerprint, None)


def _nothing() -> None:
    """Nobody waits for this one."""


def _once(function: Callable[[], None]) -> Callable[[], None]:
    waiting = [function]
    return lambda: waiting.pop()() if waiting else None
