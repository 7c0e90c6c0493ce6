"""Requests that were in the engine when its process ended: those that were there twice are not taken again."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.engine.scheduler import RequestRefused

DEADLY = 2
"""So many deaths, and a request is refused."""
REMEMBERED = 4096
"""Requests, at most."""


class RequestPoisoned(RequestRefused):
    """The engine's process ended each time it had this request: it is not tried again."""


class Suspects:
    """By fingerprint: how often the process ended while it had a request that has not been answered since."""

    def __init__(self) -> None:
        self._deaths: dict[bytes, int] = {}

    def check(self, fingerprint: bytes) -> None:
        """Raise RequestPoisoned for a request that was there too often."""
        if self._deaths.get(fingerprint, 0) >= DEADLY:
            raise RequestPoisoned(
                f"the engine's process ended {DEADLY} times while it had this request, which is not tried again: "
                "change its prompt or its parameters"
            )

    def blame(self, fingerprints: Iterable[bytes]) -> None:
        """The process has ended while it had these."""
        for fingerprint in set(fingerprints):
            self._deaths[fingerprint] = self._deaths.pop(fingerprint, 0) + 1
        for fingerprint in list(self._deaths)[:-REMEMBERED]:
            del self._deaths[fingerprint]

    def acquit(self, fingerprint: bytes) -> None:
        """It was answered, and the process lives."""
        self._deaths.pop(fingerprint, None)
