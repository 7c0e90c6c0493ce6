"""Cases about answers: what comes out of `attend` is attention."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from octavo.conformance import grids
from octavo.conformance.registry import case
from octavo.conformance.stage import Row, Stage, Step
from octavo.conformance.truth import LARGE_LOGITS, SCALED
from octavo.kv.scales import is_fp8


def lengths(stage: Stage) -> list[int]:
    """Around the block size and away from it."""
    size = stage.configuration.block_size
    return sorted({1, 7, 37, size, size + 1, 2 * size, 2 * size + 3, max(1, size - 1)})


def decoding(stage: Stage) -> list[tuple[Row, int]]:
    """Rows whose contexts, with the new token, have these lengths."""
    return [(stage.row(length - 1), 1) for length in lengths(stage)]


def mixture(stage: Stage) -> list[tuple[Row, int]]:
    """Rows that decode, prefill, and resume a prefill where that is declared."""
    size = stage.configuration.block_size
    rows = [(stage.row(length), 1) for length in (size, 0, 2 * size - 1)]
    rows += [(stage.row(0), length) for length in (size + 1, 5)]
    return rows + (resuming(stage) if stage.capabilities.prefix_caching else [])


def resuming(stage: Stage) -> list[tuple[Row, int]]:
    """Chunks that begin on a block's edge and inside one, and are shorter and longer than what stands before them."""
    size = stage.configuration.block_size
    return [(stage.row(held), new) for held, new in ((size, 3), (3, size + 2), (2 * size + 1, 6), (5, 2))]


@case(grids.all_dirt)
def prefill(stage: Stage) -> None:
    """Prompts of several lengths, nothing cached."""
    stage.run(stage.step([(stage.row(0), length) for length in lengths(stage)]))


@case(grids.all_dirt)
def decode(stage: Stage) -> None:
    """One new token behind contexts of several lengths."""
    stage.run(stage.step(decoding(stage)))


@case(grids.all_dirt)
def mixed(stage: Stage) -> None:
    """Rows that decode, prefill and resume in one batch."""
    stage.run(stage.step(mixture(stage)))


@case(grids.all_dirt, needs=lambda declared: declared.prefix_caching)
def resumed_prefill(stage: Stage) -> None:
    """Several new tokens behind keys that an earlier step wrote."""
    stage.run(stage.step(resuming(stage)))


@case(grids.once, needs=lambda declared: declared.prefix_caching)
def prefill_in_chunks(stage: Stage) -> None:
    """One prompt chunk by chunk, each chunk seeing those before it."""
    row = stage.row(0)
    for chunk in (5, 1, stage.configuration.block_size, 7):
        stage.run(stage.step([(row, chunk)]))


@case(grids.two_states)
def padding(stage: Stage) -> None:
    """Padding rows (slot -1, context 0), some or nothing else, give finite output, write nothing, disturb nobody."""
    step = stage.step(decoding(stage), padding=3)
    before = stage.cache.snapshot()
    stage.run(step)
    stage.cache.check_unchanged(before, step.batch.slots)
    stage.run(stage.step([(row, 1) for row in stage.rows[-1:]], padding=7))
    before = stage.cache.snapshot()
    stage.run(stage.step([], padding=4))  # as a graph is captured
    stage.cache.check_unchanged(before)


@case(grids.once)
def idle_rows(stage: Stage) -> None:
    """Rows without a new token, with a context and without one, give no output and disturb nobody."""
    rows = [(stage.row(9), 1), (stage.row(20), 0), (stage.row(0), 5), (stage.row(0), 0), (stage.row(0), 8)]
    stage.run(stage.step(rows))


@case(grids.all_groups)
def head_groups(stage: Stage) -> None:
    """Query heads meet the key head of their group."""
    stage.run(stage.step(mixture(stage)))


@case(grids.all_block_sizes)
def block_sizes(stage: Stage) -> None:
    """Every declared block size."""
    stage.run(stage.step(mixture(stage)))
    stage.run(stage.step([(row, 1) for row in stage.rows]))


@case(grids.all_head_sizes)
def head_sizes(stage: Stage) -> None:
    """Every declared head size, of which there may be many: few rows."""
    stage.run(stage.step([*mixture(stage)[::3], (stage.row(0), 21)]))


@case(grids.all_dtypes)
def dtypes(stage: Stage) -> None:
    """Every declared dtype with every declared cache dtype."""
    stage.run(stage.step(mixture(stage)))


@case(grids.all_features, needs=lambda declared: bool(declared.features))
def features(stage: Stage) -> None:
    """Every declared feature, alone and with all others: prefill, decode and mixtures."""
    stage.run(stage.step(mixture(stage)))
    stage.run(stage.step([(row, 1) for row in stage.rows]))


@case(grids.all_pairs)
def pairs(stage: Stage) -> None:
    """Any two of what is declared together: head and block sizes, dtypes, groups, features."""
    stage.run(stage.step(mixture(stage)))
    stage.run(stage.step([(row, 1) for row in stage.rows[::3]]))


@case(grids.once)
def layers(stage: Stage) -> None:
    """Each layer reads its own cache, in whatever order layers are asked."""
    stage.run(stage.step(mixture(stage)), layers=[1, 0])


@case(grids.once)
def two_steps(stage: Stage) -> None:
    """Steps of one backend object one after another, with rows that come, grow past a block, and go."""
    stage.run(stage.step([(stage.row(0), length) for length in (stage.configuration.block_size, 5, 1)]))
    stage.run(stage.step([(row, 1) for row in stage.rows]))
    stage.run(stage.step([(stage.rows[2], 1), (stage.rows[0], 1), (stage.row(0), 11)]))
    stage.run(stage.step([(stage.rows[3], 1)]))


@case(grids.once)
def shared_blocks(stage: Stage) -> None:
    """Rows that share the blocks of one prefix and go on differently."""
    size = stage.configuration.block_size
    first = stage.row(2 * size + 3)
    rows = [(first, 1), (stage.row(2 * size + 5, first, 2), 1), (stage.row(2 * size, first, 2), 1)]
    if stage.capabilities.prefix_caching:
        rows += [(stage.row(size, first, 1), 4), (stage.row(2 * size, first, 2), size + 1)]
    stage.run(stage.step(rows))


@case(grids.high_blocks)
def high_blocks(stage: Stage) -> None:
    """Block numbers that no small integer holds, and offsets that pass 2^31 where memory allows."""
    if stage.cache.elements <= 2**31:
        stage.remark = f"up to element {stage.cache.elements:.2g}: memory allows no more"
    stage.run(stage.step(decoding(stage)))
    stage.run(stage.step([(stage.row(0), 9), (stage.row(0), 2)]))


@case(grids.once)
def zero_query(stage: Stage) -> None:
    """Equal logits: the answer is the plain mean of the visible values, so a key too many or too few shows."""
    stage.run(stage.step(mixture(stage), draw_query=torch.zeros))


@case(grids.large_logits)
def large_logits(stage: Stage) -> None:
    """Logits near 60,000 and near -60,000: no mask value is lower, no exponential overflows."""
    stage.limit = stage.limit.worse(LARGE_LOGITS)
    key = 64.0
    query = 2.0 ** math.ceil(math.log2(60_000 / (stage.spec.scale * key * (stage.spec.head_size - 1))))

    def draw_keys(*shape: int) -> Tensor:
        """Whole logits apart by 0 to 3, exact in every dtype: only what the softmax does to them is judged."""
        keys = torch.full(shape, key)
        keys[..., -1] = torch.randint(4, shape[:-1], generator=stage.generator) / (query * stage.spec.scale)
        return keys

    for sign in (query, -query):
        rows = [(stage.row(30, draw_keys=draw_keys), 1), (stage.row(0), 9)]
        stage.run(stage.step(rows, draw_query=lambda *shape, fill=sign: torch.full(shape, fill), draw_keys=draw_keys))


@case(grids.scaled, needs=lambda declared: any(map(is_fp8, declared.kv_dtypes)))
def fp8_scales(stage: Stage) -> None:
    """Keys and values in the thousands, which scales bring into the whole range of an fp8 cache."""
    stage.limit = SCALED
    stage.run(stage.step(mixture(stage)))


def strided(step: Step, stage: Stage, pack: bool) -> Step:
    """The same numbers as slices of one packed projection, or with heads outermost."""
    parts = [step.query, step.key, step.value]
    if pack:
        heads = [stage.spec.heads, stage.spec.kv_heads, stage.spec.kv_heads]
        parts = list(torch.split(torch.cat(parts, dim=2), heads, dim=2))
    else:
        parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
    query, key, value = parts
    return replace(step, query=query, key=key, value=value)


@case(grids.once)
def strided_inputs(stage: Stage) -> None:
    """Queries, keys and values that are slices of one packed tensor, or lie head by head."""
    for pack in (True, False):
        stage.run(strided(stage.step(mixture(stage)), stage, pack))
