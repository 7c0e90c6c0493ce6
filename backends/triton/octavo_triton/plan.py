"""Who does what in one step: tensors on the device that the attending kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo_triton.tuning import DecodeTile

FIELDS: Final = 8
"""Of an item, one of which is spare: so they lie together, and each item where a wide load can begin."""


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """What parts of contexts give, until they are joined. Launches follow one another, so all steps share it."""

    partial: Tensor
    """float32 [room, kv_heads, group, head_size + 2]: weighted values, peaks and totals."""
    arrived: Tensor
    """int32 [rows, kv_heads]: how many parts have given theirs; 0 between launches."""

    @classmethod
    def of(cls, spec: AttentionSpec, room: int, rows: int, device: torch.device) -> Scratch:
        """For so many parts of so many rows."""
        return cls(
            torch.empty(room, spec.kv_heads, spec.group, spec.head_size + 2, device=device),
            torch.zeros(rows, spec.kv_heads, dtype=torch.int32, device=device),
        )

    def holds(self, room: int, rows: int) -> bool:
        """Is there room for so many?"""
        return room <= len(self.partial) and rows <= len(self.arrived)


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """What captured graphs read of a batch. They are replayed one at a time, so they share it."""

    query_starts: Tensor
    contexts: Tensor
    table: Tensor

    def holds(self, table: Tensor) -> bool:
        """Is there room for a batch with that block table?"""
        return all(new <= held for new, held in zip(table.shape, self.table.shape, strict=True))

    def filled(self, query_starts: Tensor, contexts: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of its first rows, which hold the same; the table is as wide as ever."""
        rows, width = table.shape
        views = self.query_starts[: rows + 1], self.contexts[:rows], self.table[:rows]
        views[0].copy_(query_starts)
        views[1].copy_(contexts)
        views[2][:, :width].copy_(table)
        return views


@dataclass(slots=True, eq=False)
class Decodes:
    """The rows that decode."""

    rows: int
    tile: DecodeTile
    wanted: int
    """Items that run at a time."""
    few: int
    """Tokens of all contexts up to which what is read should take nothing else's place in a cache."""
    items: Tensor
    """[room, FIELDS] int32: row (-1: nothing), first token, end, part, parts of the row, are there few tokens in all,
    and the first token's block."""
    scratch: Scratch


@dataclass(slots=True, eq=False)
class Plan:
    """One step. A captured graph's is refreshed in place."""

    query_starts: Tensor
    contexts: Tensor
    table: Tensor
    decodes: Decodes | None
    tiles: Tensor | None
    """[2, room] int32: row (-1: nothing) and number of each tile of the rows that do not decode."""
