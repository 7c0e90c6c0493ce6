"""Smaller steps for a while, after one that did not fit into the device's memory."""

from __future__ import annotations

from dataclasses import dataclass

_CALM = 64
"""Steps that fit before the next larger ones are tried."""


@dataclass(slots=True)
class Relief:
    """Limits beside those of the settings; None: there is none."""

    chunk: int | None = None
    """Prompt tokens of a step."""
    rows: int | None = None
    """Requests that run."""
    fitted: int = 0
    """Steps since, or since the limits were last raised."""

    def tokens(self, most: int) -> int:
        """Prompt tokens of a step, of which the settings allow `most`."""
        return most if self.chunk is None else min(most, max(1, self.chunk))

    def is_full(self, running: int) -> bool:
        """Do as many requests run as may?"""
        return self.rows is not None and running >= self.rows

    def calm(self) -> None:
        """A step fitted: after a number of these the limits double, and are gone once nothing has come near them."""
        if self.chunk is None and self.rows is None:
            return
        self.fitted += 1
        if self.fitted == _CALM:
            self.fitted = 0
            self.chunk, self.rows = _doubled(self.chunk), _doubled(self.rows)


def _doubled(limit: int | None) -> int | None:
    return None if limit is None or limit > _GONE else 2 * limit


_GONE = 1 << 16
"""Tokens or requests above which a limit limits nothing."""
