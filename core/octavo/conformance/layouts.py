"""Cases about the cache's layout: what is written can be read, and nothing else changes."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.conformance import configuration as grids
from octavo.conformance.registry import case
from octavo.conformance.stage import Stage
from octavo.conformance.truth import Fault, deviation, judge


@case(grids.all_dtypes)
def layout_write(stage: Stage) -> None:
    """What is written can be read, slot -1 writes nothing, and no other slot changes."""
    _round_trip(stage)


@case(grids.all_block_sizes)
def layout_blocks(stage: Stage) -> None:
    """Write and read in every block size, then copy blocks: a swap works, and no other block changes."""
    _round_trip(stage)
    cache, size = stage.cache, stage.configuration.block_size
    shape = (stage.spec.layers, len(cache.slots), stage.spec.kv_heads, stage.spec.head_size)
    key, value = (stage.exact(stage.randn(*shape)).to(stage.device) for _ in range(2))
    cache.write(key, value, cache.slots)  # dirt is alike in all blocks
    before = cache.snapshot()
    first, second, third = cache.pool[:3]
    cache.layout.copy_blocks(cache.cache, _blocks(stage, first, second), _blocks(stage, second, first))
    cache.layout.copy_blocks(cache.cache, _blocks(stage, first), _blocks(stage, third))
    for was, now in zip(before, cache.snapshot(), strict=True):
        expected = was.clone()
        # A snapshot holds the scratch block, then the pool's blocks in their order.
        new, old = (tensor.view(-1, size, *tensor.shape[1:]) for tensor in (expected, was))
        new[1], new[2], new[3] = old[2], old[1], old[2]
        if not torch.equal(now, expected):
            raise Fault("copy_blocks has not copied, or has changed another block")


def _blocks(stage: Stage, *blocks: int) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=stage.device)


def _round_trip(stage: Stage) -> None:
    cache, own = stage.cache, stage.cache.slots[stage.configuration.block_size :]  # not of the scratch block
    for layer in range(stage.spec.layers):
        slots = own[torch.randperm(len(own), generator=stage.generator)[:9].to(stage.device)]
        slots[[2, 5]] = -1
        shape = (len(slots), stage.spec.kv_heads, stage.spec.head_size)
        key, value = (stage.exact(stage.randn(*shape)) for _ in range(2))
        before = cache.snapshot()
        cache.layout.write(cache.cache, layer, key.to(stage.device), value.to(stage.device), slots)
        cache.check_unchanged(before, slots, layer)
        kept = slots >= 0
        read_key, read_value = cache.layout.read(cache.cache, layer, slots[kept])
        for what, wrote, read in (("key", key, read_key), ("value", value, read_value)):
            found = deviation(read, wrote[kept.cpu()].double())
            stage.deviation = stage.deviation.worse(found)
            judge(found, stage.limit, f"layer {layer}: the {what} read is not what was written")
