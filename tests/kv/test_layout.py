"""The cache layout, held against addresses worked out from the axes' names and a dict of slot -> (key, value)."""

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention.contract import AttentionSpec
from octavo.kv.layout import HEAD_MAJOR, PACKED, TOKEN_MAJOR, VECTOR_BYTES, Axes, AxesLayout, KVCache

CPU = torch.device("cpu")
NAMES = ("block", "slot", "head", "dim")
BLOCKS, LAYERS = 5, 2
STOCK = {"token-major": TOKEN_MAJOR, "head-major": HEAD_MAJOR, "packed": PACKED}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Truth = dict[int, tuple[Tensor, Tensor]]
"""Slot -> key and value, each [kv_heads, head_size]."""


def orders() -> list[str]:
    """Every permutation of the axes, plain and with one axis split, the packed part at every place: 384 orders."""
    found = []
    for axes, split in product(permutations(NAMES), (None, "slot", "head", "dim")):
        names = [f"{name}/x" if name == split else name for name in axes]
        places = range(5) if split else ()
        found += [" ".join(names)] if split is None else []
        found += [" ".join([*names[:place], "x", *names[place:]]) for place in places]
    return found


ORDERS = orders()


def make_spec(kv_heads: int, head_size: int, kv_dtype: torch.dtype = torch.float32) -> AttentionSpec:
    return AttentionSpec(
        layers=LAYERS,
        heads=kv_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        scale=1.0,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
    )


def make_layout(key: str, value: str | None, sizes: tuple[int, int, int], kv_dtype: torch.dtype) -> AxesLayout:
    """Sizes: block size, heads, head size."""
    return Axes(key, value)(make_spec(sizes[1], sizes[2], kv_dtype), sizes[0])


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself."""
    return tensor.view(BITS[tensor.dtype.itemsize])


def fill(cache: KVCache, seed: int) -> None:
    """Random bits: numbers, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*cache.keys, *cache.values):
        bits(tensor).random_(generator=generator)


def raw(cache: KVCache) -> list[Tensor]:
    """A copy of every bit."""
    return [bits(tensor).clone() for tensor in (*cache.keys, *cache.values)]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def address(axes: str, pack: int, block: int, slot: int, head: int, dim: int) -> tuple[int, ...]:
    """Where one element stands, by the meaning of the names alone."""
    place = {"block": block, "slot": slot, "head": head, "dim": dim}
    packed = [name.removesuffix("/x") for name in axes.split() if name.endswith("/x")]
    inner = place[packed[0]] % pack if packed else 0
    whole = {name: value // pack if name in packed else value for name, value in place.items()}
    return tuple(inner if name == "x" else whole[name.removesuffix("/x")] for name in axes.split())


def poke(tensor: Tensor, axes: str, slot: int, block_size: int, new: Tensor) -> None:
    """Write one token [heads, size] element by element; `tensor` and `new` are bits."""
    pack, elements = VECTOR_BYTES // tensor.element_size(), tensor.numpy()
    for (head, dim), element in np.ndenumerate(new.numpy()):
        elements[address(axes, pack, slot // block_size, slot % block_size, head, dim)] = element


def random_tokens(tokens: int, layout_sizes: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, tokens, *layout_sizes[1:])
    key, value = torch.randn(shape, generator=generator)
    return key, value


def check_write_and_read(
    key_axes: str, value_axes: str, sizes: tuple[int, int, int], slots: list[int], kv_dtype: torch.dtype
) -> None:
    """Written tokens can be read, their bits stand where the names say, and nothing else has changed."""
    layout = make_layout(key_axes, value_axes, sizes, kv_dtype)
    cache = layout.allocate(BLOCKS, CPU)
    fill(cache, seed=1)
    expected = raw(cache)
    key, value = random_tokens(len(slots), sizes, seed=2)
    truth: Truth = {slot: (key[i].to(kv_dtype), value[i].to(kv_dtype)) for i, slot in enumerate(slots) if slot >= 0}
    for slot, (new_key, new_value) in truth.items():
        poke(expected[1], key_axes, slot, sizes[0], bits(new_key))
        poke(expected[LAYERS + 1], value_axes, slot, sizes[0], bits(new_value))
    layout.write(cache, 1, key, value, torch.tensor(slots, dtype=torch.int64))
    assert same(raw(cache), expected)
    read_key, read_value = layout.read(cache, 1, torch.tensor(list(truth), dtype=torch.int64))
    assert read_key.shape == read_value.shape == (len(truth), *sizes[1:])
    for i, (one_key, one_value) in enumerate(truth.values()):
        assert same([bits(read_key[i]), bits(read_value[i])], [bits(one_key), bits(one_value)])


@pytest.mark.parametrize("axes", ORDERS)
def test_every_order_of_axes(axes: str) -> None:
    """All sizes equal, so that axes of one shape that are mixed up are noticed; -1 is not the last slot."""
    check_write_and_read(axes, axes, (4, 4, 4), [19, -1, 7, 4, 11], torch.float32)


@settings(deadline=None)
@given(
    axes=st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)),
    sizes=st.tuples(*[st.sampled_from([8, 16])] * 3),
    kv_dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    data=st.data(),
)
def test_write_then_read(
    axes: tuple[str, str], sizes: tuple[int, int, int], kv_dtype: torch.dtype, data: st.DataObject
) -> None:
    """Any slots outside the scratch block in any order, and -1 any number of times."""
    owned = st.lists(st.integers(sizes[0], sizes[0] * BLOCKS - 1), unique=True, max_size=6)
    slots = data.draw(st.permutations([*data.draw(owned), *[-1] * data.draw(st.integers(0, 3))]))
    check_write_and_read(*axes, sizes, slots, kv_dtype)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("axes", [(TOKEN_MAJOR.key, TOKEN_MAJOR.key), (PACKED.key, PACKED.value)])
def test_one_byte_caches(axes: tuple[str, str], kv_dtype: torch.dtype) -> None:
    check_write_and_read(*axes, (16, 2, 16), [18, -1, 47, 33], kv_dtype)


@settings(deadline=None)
@given(
    axes=st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)),
    kv_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    pairs=st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)), unique_by=lambda pair: pair[1]),
)
def test_copy_blocks(axes: tuple[str, str], kv_dtype: torch.dtype, pairs: list[tuple[int, int]]) -> None:
    """All sources are read before a target is written (a swap works); the other blocks keep every bit."""
    sizes = (16, 16, 16)
    layout = make_layout(*axes, sizes, kv_dtype)
    cache = layout.allocate(BLOCKS, CPU)
    fill(cache, seed=3)
    before, expected = raw(cache), raw(cache)
    for source, target in pairs:
        for i, tensor in enumerate(expected):
            where = axes[i // LAYERS].split().index("block")
            tensor.select(where, target).copy_(before[i].select(where, source))
    sources, targets = (torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in (0, 1))
    layout.copy_blocks(cache, sources, targets)
    assert same(raw(cache), expected)


@settings(deadline=None)
@given(axes=st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)), blocks=st.lists(st.integers(0, BLOCKS - 1)))
def test_read_blocks_is_read_block_by_block(axes: tuple[str, str], blocks: list[int]) -> None:
    sizes = (8, 4, 4)
    layout = make_layout(*axes, sizes, torch.float32)
    cache = layout.allocate(BLOCKS, CPU)
    fill(cache, seed=6)
    slots = torch.tensor(
        [block * sizes[0] + offset for block in blocks for offset in range(sizes[0])], dtype=torch.int64
    )
    whole = layout.read_blocks(cache, 0, torch.tensor(blocks, dtype=torch.int64))
    single = layout.read(cache, 0, slots)
    assert whole[0].shape == whole[1].shape == (len(blocks), *sizes)
    assert same([bits(tensor).flatten(0, 1) for tensor in whole], [bits(tensor) for tensor in single])


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_block_bytes_are_those_of_the_tensors(name: str, kv_dtype: torch.dtype) -> None:
    layout = STOCK[name](make_spec(3, 80, kv_dtype), 24)
    cache = layout.allocate(BLOCKS, CPU)
    held = sum(tensor.untyped_storage().nbytes() for tensor in (*cache.keys, *cache.values))
    assert layout.block_bytes * BLOCKS == held


def test_strided_tokens_are_written() -> None:
    """Keys and values are often slices of one packed projection."""
    layout = TOKEN_MAJOR(make_spec(2, 8), 4)
    cache = layout.allocate(BLOCKS, CPU)
    packed = torch.arange(3 * 6 * 8, dtype=torch.float32).view(3, 6, 8)
    slots = torch.tensor([17, 4, 10])
    layout.write(cache, 0, packed[:, 2:4], packed[:, 4:6], slots)
    assert same(layout.read(cache, 0, slots), [packed[:, 2:4], packed[:, 4:6]])


def test_read_gives_copies() -> None:
    layout = HEAD_MAJOR(make_spec(1, 4), 1)
    cache = layout.allocate(BLOCKS, CPU)
    fill(cache, seed=7)
    before = raw(cache)
    for tensor in (*layout.read(cache, 0, torch.tensor([2])), *layout.read_blocks(cache, 0, torch.tensor([2]))):
        tensor.zero_()
    assert same(raw(cache), before)


def test_views_share_the_cache_memory() -> None:
    """A backend reads through the view what `write` has put there."""
    layout = PACKED(make_spec(2, 8), 4)
    cache = layout.allocate(BLOCKS, CPU)
    key, value = random_tokens(1, (4, 2, 8), seed=8)
    layout.write(cache, 1, key, value, torch.tensor([14]))
    assert torch.equal(layout.key_view(cache, 1)[3, 2].reshape(2, 8), key[0])
    assert torch.equal(layout.value_view(cache, 1)[3, 2].reshape(2, 8), value[0])
    assert layout.key_view(cache, 1).untyped_storage().data_ptr() == cache.keys[1].untyped_storage().data_ptr()


def test_layouts_are_equal_when_interchangeable() -> None:
    spec = make_spec(4, 8)
    assert TOKEN_MAJOR(spec, 4) == Axes("block slot head dim")(spec, 4)
    assert TOKEN_MAJOR(spec, 4) != HEAD_MAJOR(spec, 4)
    assert TOKEN_MAJOR(spec, 4) != TOKEN_MAJOR(spec, 8)
    assert TOKEN_MAJOR(spec, 4) != TOKEN_MAJOR(make_spec(4, 8, torch.float16), 4)


@pytest.mark.parametrize(
    ("axes", "at_fault"),
    [
        ("block slot head", "axis dim is missing"),
        ("slot head dim", "axis block is missing"),
        ("block slot head dim head", "axis head stands 2 times"),
        ("block slot head dim/x dim x", "axis dim stands 2 times"),
        ("block slot head size", "axis size .* is not one of block, slot, head, dim"),
        ("block slot head dim/y y", "axis dim/y .* is not one of"),
        ("block/x slot head dim x", "axis block/x .*cannot be packed"),
        ("block slot head/x dim/x x", "axis dim/x .*only one axis can be split, head is already"),
        ("block slot head dim/x", "axis dim/x has no x"),
        ("block slot head dim x", "axis x has no axis that it splits"),
        ("block slot head dim/x x x", "axis x stands 2 times"),
        ("block slot head/x dim x", "axis head/x .*: 2 is not a multiple of x = 4"),
        ("block slot/x head dim x", "axis slot/x .*: 6 is not a multiple of x = 4"),
        ("", "axis block is missing"),
    ],
)
@pytest.mark.parametrize("which", ["key", "value"])
def test_senseless_axes_are_refused(axes: str, at_fault: str, which: str) -> None:
    senseless = Axes(axes) if which == "key" else Axes("block slot head dim", axes)
    with pytest.raises(ValueError, match=at_fault):
        senseless(make_spec(2, 8), 6)


@pytest.mark.parametrize("block_size", [0, -16])
def test_block_size_is_positive(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}"):
        TOKEN_MAJOR(make_spec(2, 8), block_size)
