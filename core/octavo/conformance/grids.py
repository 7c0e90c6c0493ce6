"""Which configurations follow from what a backend declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any

import torch

from octavo.attention.contract import Capabilities
from octavo.conformance.configuration import Configuration, Dirt
from octavo.conformance.pairs import covering
from octavo.kv.scales import is_fp8


def _declared(sizes: tuple[int | EllipsisType, ...], any_other: tuple[int, ...]) -> list[int]:
    """The sizes named, and those that stand for `...`."""
    named = [size for size in sizes if isinstance(size, int)]
    return sorted({*named, *(any_other if ... in sizes else ())})


def block_sizes(capabilities: Capabilities) -> list[int]:
    """Every declared block size; `...` is tried at 1, 16, 24 (no power of two), 64 and 256."""
    return _declared(capabilities.block_sizes, (1, 16, 24, 64, 256))


def head_sizes(capabilities: Capabilities) -> list[int]:
    """Every declared head size; `...` is tried at 64, 80 (no power of two) and 128."""
    return _declared(capabilities.head_sizes, (64, 80, 128))


def base(capabilities: Capabilities) -> Configuration:
    """The smallest declared sizes (but blocks of 16 where they can be), fp32 where it can be."""
    blocks, dtypes = block_sizes(capabilities), capabilities.dtypes
    dtype = torch.float32 if torch.float32 in dtypes else dtypes[0]
    return Configuration(
        head_size=head_sizes(capabilities)[0],
        block_size=16 if 16 in blocks else blocks[0],
        dtype=dtype,
        kv_dtype=_cache_of(dtype, capabilities),
    )


def once(capabilities: Capabilities) -> Iterator[Configuration]:
    """The base alone."""
    yield base(capabilities)


def all_dirt(capabilities: Capabilities) -> Iterator[Configuration]:
    """The base with each state of the cache."""
    for dirt in Dirt:
        yield replace(base(capabilities), dirt=dirt)


def two_states(capabilities: Capabilities) -> Iterator[Configuration]:
    """The base with a cache of NaN, and with one of ordinary numbers."""
    for dirt in (Dirt.NAN, Dirt.FINITE):
        yield replace(base(capabilities), dirt=dirt)


def plain_and_together(capabilities: Capabilities) -> Iterator[Configuration]:
    """The base on a cache of NaN; all features together on one of ordinary numbers, which pass where NaN shows."""
    yield base(capabilities)
    yield replace(next(_together(capabilities)), dirt=Dirt.FINITE)


GROUPS = ((4, 4), (6, 2), (8, 2), (7, 1), (8, 1), (16, 1))
"""Query heads and key heads: 1, 3, 4, 7, 8 and 16 to one, as models have them. The base has 2."""


def all_groups(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each group of query heads."""
    for heads, kv_heads in GROUPS:
        yield replace(base(capabilities), heads=heads, kv_heads=kv_heads)


def all_block_sizes(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared block size."""
    for size in block_sizes(capabilities):
        yield replace(base(capabilities), block_size=size, layers=1)


def all_head_sizes(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared head size."""
    for size in head_sizes(capabilities):
        yield replace(base(capabilities), head_size=size, layers=1)


def all_dtypes(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared dtype with each declared cache dtype: any two may meet."""
    for dtype in capabilities.dtypes:
        for kv_dtype in capabilities.kv_dtypes:
            yield replace(base(capabilities), dtype=dtype, kv_dtype=kv_dtype)


def all_layouts(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared block size and each declared cache dtype."""
    sized = (replace(one, layers=2) for one in all_block_sizes(capabilities))
    yield from dict.fromkeys((*all_dtypes(capabilities), *sized))


def scaled(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared dtype with each declared fp8 cache, with scales."""
    for configuration in all_dtypes(capabilities):
        if is_fp8(configuration.kv_dtype):
            yield replace(configuration, scaled=True)


def all_features(capabilities: Capabilities) -> Iterator[Configuration]:
    """Each declared feature, all of them together, and all of them in each dtype."""
    plain, features = base(capabilities), capabilities.features
    if "window" in features:
        for window in (1, max(2, plain.block_size // 4), plain.block_size + 5, 100_000):
            yield replace(plain, window=window)
    if "softcap" in features:
        yield replace(plain, softcap=2.0)
    if "sinks" in features:
        yield replace(plain, sinks=True)
    if "alibi" in features:
        yield replace(plain, alibi=True)
    if len(features) > 1:
        yield from _together(capabilities)


def _together(capabilities: Capabilities) -> Iterator[Configuration]:
    """All declared features in each dtype."""
    together = _features(base(capabilities), capabilities)
    for dtype in capabilities.dtypes:
        yield replace(together, dtype=dtype, kv_dtype=_cache_of(dtype, capabilities))


def _features(plain: Configuration, capabilities: Capabilities) -> Configuration:
    features = capabilities.features
    return replace(
        plain,
        window=plain.block_size + 5 if "window" in features else None,
        softcap=2.0 if "softcap" in features else None,
        sinks="sinks" in features,
        alibi="alibi" in features,
    )


def invariant(capabilities: Capabilities) -> Iterator[Configuration]:
    """The base, and all declared features in each dtype, where a token's bits are to be its own affair."""
    for plain in dict.fromkeys((base(capabilities), *_together(capabilities))):
        yield replace(plain, batch_invariant=True, layers=1)


def generation(capabilities: Capabilities) -> Iterator[Configuration]:
    """A model without features, and one with those of window and soft cap that are declared.

    None with heads that have no rotary positions, or with caches of fp8 alone: they round by more than tells tokens
    apart, and random weights have no scales.
    """
    plain = base(capabilities)
    if plain.head_size % 2 or plain.kv_dtype.itemsize < 2:
        return
    yield plain
    if capabilities.features & {"window", "softcap"}:
        yield replace(_features(plain, capabilities), sinks=False, alibi=False)


def large_logits(capabilities: Capabilities) -> Iterator[Configuration]:
    """The base in each dtype, and with a soft cap. A scale that is a power of two keeps whole logits exact."""
    plain = replace(base(capabilities), scale=0.125)
    for dtype in dict.fromkeys((plain.dtype, *capabilities.dtypes)):
        yield replace(plain, dtype=dtype, kv_dtype=_cache_of(dtype, capabilities))
    if "softcap" in capabilities.features:
        yield replace(plain, softcap=2.0)


def high_blocks(capabilities: Capabilities) -> Iterator[Configuration]:
    """In a cache that is as large as there is room for: the base, and the smallest keys, which are the most."""
    plain = replace(base(capabilities), block_size=block_sizes(capabilities)[0], heads=2, kv_heads=1, layers=1)
    smallest = min((plain.kv_dtype, *capabilities.kv_dtypes), key=lambda dtype: dtype.itemsize)
    for kv_dtype in dict.fromkeys((plain.kv_dtype, smallest)):
        yield replace(plain, kv_dtype=kv_dtype, high=True)


def all_pairs(capabilities: Capabilities) -> Iterator[Configuration]:
    """Any two of what is declared together in one configuration: sizes, dtypes, groups, features."""
    features = capabilities.features
    factors: tuple[Sequence[Any], ...] = (
        ((2, 2), (6, 2), (7, 1)),
        _few(head_sizes(capabilities)),
        _few(block_sizes(capabilities)),
        capabilities.dtypes,
        capabilities.kv_dtypes,
        (None, 3, 21) if "window" in features else (None,),
        (None, 2.0) if "softcap" in features else (None,),
        (False, True) if "sinks" in features else (False,),
        (False, True) if "alibi" in features else (False,),
    )
    for row in covering([len(values) for values in factors]):
        (heads, kv_heads), head_size, block_size, dtype, kv_dtype, window, softcap, sinks, alibi = (
            values[index] for values, index in zip(factors, row, strict=True)
        )
        yield Configuration(
            heads=heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype,
            window=window, softcap=softcap, sinks=sinks, alibi=alibi, layers=1,
        )  # fmt: skip


def _few(sizes: list[int]) -> list[int]:
    """Of many, the least, the largest, a usual one and one that is no power of two."""
    if len(sizes) <= 4:
        return sizes
    odd = next((size for size in sizes if size & (size - 1)), sizes[1])
    return sorted({sizes[0], 64 if 64 in sizes else sizes[len(sizes) // 2], odd, sizes[-1]})


def _cache_of(dtype: torch.dtype, capabilities: Capabilities) -> torch.dtype:
    """The cache dtype that goes with it: its own where it can be."""
    return dtype if dtype in capabilities.kv_dtypes else capabilities.kv_dtypes[0]
