"""The batches on which attention is measured: rows that decode, prompts, and steps with both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "prefill", "mixed"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step, those of one new token first."""

    name: str
    contexts: tuple[int, ...]
    """Tokens of each row, this step's among them."""
    new: tuple[int, ...]
    """This step's."""

    @classmethod
    def decodes(cls, rows: int, context: int) -> Batch:
        """Rows of one new token."""
        return cls(f"{rows} x {context}", (context,) * rows, (1,) * rows)

    @classmethod
    def prompts(cls, rows: int, length: int, behind: int = 0) -> Batch:
        """Rows of `length` new tokens, behind as many that were there before."""
        name = f"{rows} x {length}" + (f" behind {behind}" if behind else "")
        return cls(name, (behind + length,) * rows, (length,) * rows)

    def with_decodes(self, rows: int, context: int) -> Batch:
        """The same step, with rows of one new token in front."""
        name = f"{self.name} with {rows} decodes of {context}"
        return Batch(name, (context,) * rows + self.contexts, (1,) * rows + self.new)

    @property
    def kind(self) -> Kind:
        """Do all rows decode, none, or some?"""
        if max(self.new) == 1:
            return "decode"
        return "prefill" if min(self.new) > 1 else "mixed"


GRID = [
    *(Batch.decodes(1, context) for context in (1024, 8192, 32768, 65536)),
    *(Batch.decodes(8, context) for context in (2048, 4096, 16384)),
    *(Batch.decodes(*shape) for shape in ((32, 2048), (32, 4096), (64, 8192), (256, 1024))),
    Batch("1 x 65536 with 63 x 512", (65536, *[512] * 63), (1,) * 64),
    *(Batch.prompts(*shape) for shape in ((16, 1024), (4, 4096), (1, 16384), (1, 512, 8192), (1, 512, 65536))),
    *(Batch.prompts(*shape).with_decodes(64, 2048) for shape in ((4, 1024), (1, 2048), (1, 512, 8192))),
]
SMALL = [
    Batch.decodes(1, 1024),
    Batch.decodes(8, 512),
    Batch.prompts(2, 128),
    Batch.prompts(1, 128).with_decodes(4, 512),
    Batch.decodes(8, 1024),
    Batch.decodes(32, 512),
    Batch("1 prompt of 1024", (1024,), (1024,)),  # 1 x 1024 decodes
]
"""For a device that has no such memory and speed."""


def chosen(usual: Sequence[Batch], names: Sequence[str], only: str | None) -> list[Batch]:
    """The usual ones, or those of any grid that have these names, as far as they are of that kind.

    Raises ValueError for a name that no batch has, with those that there are, and where nothing is left.
    """
    known = {_spelled(batch.name): batch for batch in (*GRID, *SMALL, *usual)}
    if unknown := [name for name in names if _spelled(name) not in known]:
        raise ValueError(f'there is no batch "{unknown[0]}": {", ".join(batch.name for batch in known.values())}')
    batches = [known[_spelled(name)] for name in names] or list(usual)
    found = [batch for batch in batches if only in (None, batch.kind)]
    if not found:
        raise ValueError(
            f"none of these batches is {only} (decode, prefill, mixed): {', '.join(batch.name for batch in batches)}"
        )
    return found


def _spelled(name: str) -> str:
    """Spaces and case do not matter."""
    return "".join(name.split()).casefold()
