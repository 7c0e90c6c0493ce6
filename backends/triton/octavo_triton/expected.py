"""How long decoding must take at least, calculated: for GPUs that nobody here has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.attention.ahead import Expectation
from octavo.attention.contract import AttentionSpec
from octavo_triton.chips import Chip

_BEGUN, _ROUND, _JOINED = 64, 48, 16
_SHARES = 32
"""As kernels/decode.py has them."""


def share_out(contexts: Sequence[int], wanted: int, room: int, unit: int) -> list[int]:
    """Parts of each row, as the kernel `split` makes them on the device, of up to 512 rows without a window."""
    tokens = np.asarray(contexts, dtype=np.int64)
    everything = float(tokens.sum())
    share = np.clip(everything / wanted * 2 ** (1 - np.arange(_SHARES) * (8 / _SHARES)), 1, 1 << 30).astype(np.int64)
    parts = _parts(tokens[None, :], share[:, None], unit)
    count = parts.sum(1)
    longest, mean = np.ceil(tokens / parts).max(1), everything / count
    joins = np.where(parts.max(1) > 1, np.ceil(parts.max(1) / _JOINED) * _ROUND, 0)
    cost = np.ceil(count / wanted) * (mean + _BEGUN) + (longest - mean) + joins
    best = int(np.where(count > room, np.inf, cost).argmin())
    return [int(number) for number in parts[best]]


def _parts(tokens: NDArray[np.int64], share: NDArray[np.int64], unit: int) -> NDArray[np.int64]:
    size = -(-share // unit) * unit
    made: NDArray[np.int64] = np.maximum(-(-tokens // size), 1)
    return made


def expected(
    spec: AttentionSpec, contexts: Sequence[int], parts: Sequence[int], chip: Chip, programs_per_processor: int
) -> Expectation:
    """Of rows that are cut into so many parts, each for every key head one program."""
    read = 2 * sum(contexts) * spec.kv_heads * spec.head_size * spec.kv_dtype.itemsize
    joined = sum(count for count in parts if count > 1)
    partial = 2 * joined * spec.heads * (spec.head_size + 2) * 4  # float32, written and read
    programs = sum(parts) * spec.kv_heads
    at_a_time = chip.processors * programs_per_processor
    turns = -(-programs // at_a_time)
    idle = max(1.0, turns * at_a_time / programs) if programs > at_a_time else 1.0
    return Expectation(
        read_bytes=read,
        programs=programs,
        programs_per_processor=programs_per_processor,
        turns=turns,
        seconds=(read + partial) / chip.bytes_per_second * idle,
    )
