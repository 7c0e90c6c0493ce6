"""Block tables as FlashInfer reads them: the blocks of all rows one after another, which it calls pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """How many pages each row has, on the host: FlashInfer shares out its work there."""

    starts: Tensor
    """[rows + 1] int32, on the host: row i has the pages `starts[i]:starts[i + 1]`, at least one."""
    last: Tensor
    """[rows] int32, on the host: tokens in each row's last page; 0 where there is no context."""

    @classmethod
    def of(cls, contexts: Integers, block_size: int) -> Pages:
        """For rows with so many tokens [rows] of context.

        A row without context has a page of which nothing is read: FlashInfer's plan for captured steps counts rows
        without pages one time, and another time not.
        """
        counts = np.maximum(-(-contexts // block_size), 1)
        starts = np.append(0, np.cumsum(counts)).astype(np.int32)
        last = (contexts - (counts - 1) * block_size).astype(np.int32)
        return cls(torch.from_numpy(starts), torch.from_numpy(last))

    @property
    def total(self) -> int:
        """Of all rows."""
        return int(self.starts[-1])

    def gathered(self, table: Tensor, rows: Integers, out: Tensor | None = None) -> Tensor:
        """Their ids: int32 [total], on the table's device, which is not waited for.

        table: [any, width] int32; rows: which of them each is. `out`: where to put them.
        """
        starts = self.starts.numpy().astype(np.int64)
        # Where in the flattened table a page stands, less where it goes: one number for each row.
        shifts = rows.astype(np.int64) * table.shape[1] - starts[:-1]
        shift, counts = sent(torch.from_numpy(np.stack([shifts, np.diff(starts)])), table.device)
        places = torch.repeat_interleave(shift, counts, output_size=self.total)
        places += torch.arange(self.total, device=table.device)
        return torch.index_select(table.reshape(-1), 0, places, out=out)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device, which is not waited for."""
    return pinned(tensor, device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """The same in memory that the device reads by itself: a transfer from any other may wait for what it computes."""
    return tensor.pin_memory() if device.type == "cuda" else tensor
