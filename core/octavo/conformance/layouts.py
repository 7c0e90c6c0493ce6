"""Cases about the cache's layout: what is written can be read, and nothing else changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.conformance import grids
from octavo.conformance.registry import case
from octavo.conformance.stage import Stage
from octavo.conformance.truth import Fault, deviation, judge


@case(grids.all_layouts)
def layout(stage: Stage) -> None:
    """What is written can be read, slot -1 writes nothing, blocks are copied, and nothing else changes."""
    _round_trip(stage)
    _copies(stage)
    before = stage.cache.snapshot()
    for tensor in stage.cache.layout.read(stage.cache.cache, 0, stage.cache.slots[:2]):
        tensor.zero_()
    stage.cache.check_unchanged(before)


@case(grids.all_layouts)
def block_bytes(stage: Stage) -> None:
    """A block takes the bytes that the layout says: by them core knows how many fit."""
    layout = stage.cache.layout
    few, many = (_bytes_of(partial(layout.allocate, count, stage.device)) for count in (2, 18))
    if many - few != 16 * layout.block_bytes:
        raise Fault(f"block_bytes is {layout.block_bytes}, and a block takes {(many - few) / 16:g} bytes")


class _Made(TorchDispatchMode):
    """Keeps an eye on every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors += [weakref.ref(one) for one in tree_leaves(result) if isinstance(one, Tensor)]
        return result


def _bytes_of(allocate: Callable[[], Any]) -> int:
    """Of all tensors that are left of it, whatever holds them."""
    with _Made() as made:
        cache = allocate()
    storages = [tensor.untyped_storage() for ref in made.tensors if (tensor := ref()) is not None]
    taken: int = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    del cache
    return taken


def _copies(stage: Stage) -> None:
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
