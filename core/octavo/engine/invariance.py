"""Has a token the same bits at another place of a step? Nobody promises it of a library's kernels: it is tried."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.fixed import FixedSteps
from octavo.engine.sampling_batch import build_batch
from octavo.engine.step import Step

_LENGTH = 8
"""Tokens of each sequence that is tried."""
_NOTHING = torch.zeros(0, dtype=torch.int64)


@torch.inference_mode()
def is_invariant(steps: FixedSteps, num_blocks: int, block_size: int, vocab_size: int) -> bool:
    """Compute sequences that fill a step, and again the other way round, all but their last tokens and then those.

    Writes to blocks that nobody has yet.
    """
    length = min(_LENGTH, (num_blocks - 1) * block_size)
    blocks = -(-length // block_size)
    count = min(steps.tokens // length, (num_blocks - 1) // blocks)
    ids = np.random.default_rng(0).integers(vocab_size, size=(count, length))
    table = 1 + np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
    back = np.arange(count)[::-1]
    whole = _logits(steps, ids, table, 0, block_size)
    most = _logits(steps, ids[back, :-1], table[back], 0, block_size)
    last = _logits(steps, ids[back, -1:], table[back], length - 1, block_size)
    again = torch.cat([most, last], dim=1)[torch.from_numpy(back.copy())]
    return torch.equal(whole.view(torch.uint8), again.view(torch.uint8))


def _logits(steps: FixedSteps, ids: NDArray[np.int64], table: NDArray[np.int32], start: int, block_size: int) -> Tensor:
    """On the host, [rows, tokens, vocab], of rows of ids [rows, tokens] from position `start` on."""
    rows, tokens = ids.shape
    positions = np.tile(np.arange(start, start + tokens), rows)
    of_token = np.repeat(np.arange(rows), tokens)
    slots = table[of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
    step = Step(
        token_ids=ids.reshape(-1),
        positions=positions,
        slots=slots,
        query_starts=np.arange(0, rows * tokens + 1, tokens, dtype=np.int32),
        context_lengths=np.full(rows, start + tokens, dtype=np.int32),
        block_table=table,
        decodes=rows if tokens == 1 else 0,
        copies=np.zeros((0, 2), dtype=np.int64),
        logits_of=np.arange(rows * tokens),
        sampling=build_batch([]),
        prompts=[],
        processors=[],
    )
    return steps.run(step, _NOTHING)[0].to("cpu", copy=True).view(rows, tokens, -1)
