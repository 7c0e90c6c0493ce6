"""What `ATTENTION` may say.

    paged                           the backend of that name, on whichever platform it can run
    rocm/paged                      the one of that platform
    prefill=flashinfer,decode=paged one for each phase, in any order
    auto, or nothing                the best that can run

Case and spaces do not matter.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

PHASES = ("prefill", "decode")


class UnknownBackend(ValueError):
    """`ATTENTION` names what nobody has, or cannot be read."""


class BackendUnavailable(ValueError):
    """No backend, or not the one that was asked for, can serve this model on this device."""


@dataclass(frozen=True, slots=True)
class Wish:
    """`ATTENTION`, read. Neither name nor phases: the best that can run."""

    name: str | None = None
    phases: tuple[str, str] | None = None
    """For prefill, for decode."""

    def __str__(self) -> str:
        return ",".join(map("=".join, zip(PHASES, self.phases, strict=True))) if self.phases else self.name or "auto"


def parse(attention: str | None) -> Wish:
    """Read `ATTENTION`. Raises `UnknownBackend` with the grammar on anything else."""
    text = "".join((attention or "").split()).casefold()
    if text in ("", "auto"):
        return Wish()
    if "=" not in text and "," not in text:
        return Wish(name=text)
    names: dict[str, str] = {}
    for part in text.split(","):
        phase, _, name = part.partition("=")
        if phase not in PHASES or phase in names or not name or "=" in name:
            raise _unreadable(attention, f'"{part}" is not one of prefill=NAME and decode=NAME, each once')
        names[phase] = name
    missing = [phase for phase in PHASES if phase not in names]
    if missing:
        raise _unreadable(attention, f"it names no backend for {missing[0]}")
    return Wish(phases=(names["prefill"], names["decode"]))


def close_matches(name: str, known: Iterable[str]) -> list[str]:
    """Those of `known` that `name` may be a misspelling of, the closest first."""
    spelled = {spelling.casefold(): spelling for spelling in known}
    return [spelled[match] for match in difflib.get_close_matches(name.casefold(), spelled, n=3)]


def _unreadable(attention: str | None, problem: str) -> UnknownBackend:
    return UnknownBackend(
        f'attention "{attention}": {problem}; write NAME, PLATFORM/NAME, or prefill=NAME,decode=NAME, or leave it unset'
    )
