"""Requests whose prompts are being computed, for those that begin alike and had better wait for them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Request
from octavo.kv.node import Namespace


class Leaders:
    """Requests whose prompts are being computed, found by their first block: less than a block is not waited for."""

    def __init__(self, block_size: int, running: Iterable[Request]) -> None:
        self._block_size = block_size
        self._by_first_block: dict[tuple[Namespace, bytes], list[Request]] = {}
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        """It runs; one that decodes has nothing left to wait for."""
        if request.uses_cache and request.computed < request.length - 1:
            self._by_first_block.setdefault(self._key(request), []).append(request)

    def shared(self, request: Request) -> int:
        """Tokens of the longest run of full blocks that it shares with one of them; its last token is not shared."""
        mine = request.known[:-1]
        alike = self._by_first_block.get(self._key(request), ())
        longest = max((_common_prefix(leader.known, mine) for leader in alike), default=0)
        return longest - longest % self._block_size

    def _key(self, request: Request) -> tuple[Namespace, bytes]:
        return request.namespace, request.known[: self._block_size].tobytes()


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading tokens are equal."""
    length = min(len(a), len(b))
    if not length:
        return 0
    differ = a[:length] != b[:length]
    first = int(differ.argmax())
    return first if differ[first] else length
