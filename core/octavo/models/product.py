"""A product of a few rows on a GPU: it waits for the weights, so what counts is how many bytes are on their way.

Libraries choose among kernels that were written for many rows. Here each program reads a stripe of the weight, and all
programs run at once. One row is a sum for each output, which needs no matrix unit. For a few rows the weight is the
product's left side, whose rows fill the matrix unit, and outputs that are too few for all processors have their sums
cut into parts, which the last one to end adds up in their order.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional

from octavo.models import product_kernels as kernels

logger = logging.getLogger(__name__)

MOST_ROWS = 32
"""Above, a library is as fast (measured on an H200)."""
_COLUMNS, _DEPTH, _MOST_STAGES = 64, 128, 6
"""Outputs and inputs of a tile of the weight, and how many tiles are on their way at most."""
_SHORT, _LONG = 512, 4096
"""Inputs that a part has at least, where outputs are for a quarter of the processors, and where they are for more."""
_SHARED_BYTES = 200_000
"""Of a processor, for tiles that are on their way."""
_ROW_COLUMNS, _ROW_DEPTH, _ROW_STAGES = 8, 512, 4
"""The same for one row, which no other shape makes faster for all weights."""
_WARPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """What parts of sums give, until they are added up. All products share it, and follow one another on one stream."""

    processors: int
    partial: Tensor
    """float32 [programs, _COLUMNS, MOST_ROWS]."""
    arrived: Tensor
    """int32 [tiles], 0 between launches."""

    @classmethod
    def of(cls, processors: int, device: torch.device) -> Scratch:
        """For a device: sums are cut only where all parts run at once."""
        partial = torch.empty(processors, _COLUMNS, MOST_ROWS, device=device)
        return cls(processors, partial, torch.zeros(processors, dtype=torch.int32, device=device))


@cache
def scratch(device: torch.device) -> Scratch:
    """One GPU's. To be asked for before anything is captured, whose memory it must not be."""
    return Scratch.of(torch.cuda.get_device_properties(device).multi_processor_count, device)


@cache
def works(device: torch.device) -> bool:
    """Is it known to be faster here than a library's, and can it run? On Hopper, where it was measured; tried once."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        product(*torch.zeros(2, 1, 512, dtype=torch.bfloat16, device=device).unbind())
    except Exception as error:  # whatever a compiler lacks here
        logger.warning("products of a few rows are a library's: %s", " ".join(str(error).split())[:300])
        return False
    return True


def fits(weight: Tensor) -> bool:
    """Is it for weights such as this: plain ones, of two bytes an element?"""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.dtype in (torch.bfloat16, torch.float16)
    return plain and weight.is_contiguous() and works(weight.device)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] @ weight [out, in] + bias [out] -> [..., out], the sums in float32."""
    columns, depth = weight.shape
    rows = x.numel() // depth
    if not 0 < rows <= MOST_ROWS:
        return functional.linear(x, weight, bias)
    flat = x.reshape(rows, depth)
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(weight):
        run(out, flat if flat.stride(1) == 1 else flat.contiguous(), weight, bias, scratch(weight.device))
    return out


def run(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, held: Scratch) -> None:
    """x [rows, in] @ weight [out, in] + bias into out [rows, out] (or of as many elements), for 1 to MOST_ROWS rows."""
    (rows, depth), columns = x.shape, len(weight)
    if rows == 1:
        kernels.one_row[(triton.cdiv(columns, _ROW_COLUMNS),)](
            out, x, weight, bias, columns, depth,
            COLUMNS=_ROW_COLUMNS, DEPTH=_ROW_DEPTH, WHOLE=depth % _ROW_DEPTH == 0, STAGES=_ROW_STAGES,
            num_warps=_WARPS,
        )  # fmt: skip
        return
    held_rows = max(16, triton.next_power_of_2(rows))
    tiles = triton.cdiv(columns, _COLUMNS)
    least = _SHORT if 4 * tiles <= held.processors else _LONG
    parts = max(1, min(held.processors // tiles, depth // least))
    resident = triton.cdiv(tiles * parts, held.processors)
    stages = _SHARED_BYTES // resident // (2 * _DEPTH * (_COLUMNS + held_rows))
    kernels.few_rows[(tiles, parts)](
        out, x, weight, bias, held.partial, held.arrived, rows, columns, depth, x.stride(0),
        ROWS=held_rows, COLUMNS=_COLUMNS, DEPTH=_DEPTH, WHOLE=depth % _DEPTH == 0, SPLIT=parts > 1,
        STAGES=min(max(stages, 3), _MOST_STAGES), num_warps=_WARPS,
    )  # fmt: skip
