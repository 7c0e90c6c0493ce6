"""From one layout to another: the slots that were named arrive, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.device import CPU as DEVICE
from octavo.conformance.configuration import Configuration
from octavo.conformance.stage import Stage
from octavo.conformance.truth import Fault
from octavo.kv.layout import translate
from octavo_reference.backend import ReferenceBackend
from tests.kv.test_layout import (
    BLOCKS,
    CPU,
    LAYERS,
    ORDERS,
    STOCK,
    bits,
    fill,
    make_layout,
    make_spec,
    poke,
    random_tokens,
    raw,
    same,
)


@pytest.mark.parametrize("source", STOCK)
@pytest.mark.parametrize("target", STOCK)
def test_translate(source: str, target: str) -> None:
    """Every pair of stock layouts: the chosen slots arrive, the target's other slots keep every bit."""
    spec, block_size, slots = make_spec(8, 8), 8, [11, 9, 39, 24]
    held_layout, wanted_layout = STOCK[source](spec, block_size), STOCK[target](spec, block_size)
    held, wanted = held_layout.allocate(BLOCKS, CPU), wanted_layout.allocate(BLOCKS, CPU)
    fill(held, seed=4)
    fill(wanted, seed=5)
    expected, axes = raw(wanted), STOCK[target]
    for layer in range(LAYERS):
        key, value = random_tokens(len(slots), (block_size, 8, 8), seed=layer)
        held_layout.write(held, layer, key, value, torch.tensor(slots))
        for i, slot in enumerate(slots):
            poke(expected[layer], axes.key, slot, block_size, bits(key[i]))
            poke(expected[LAYERS + layer], axes.value or axes.key, slot, block_size, bits(value[i]))
    translate(held_layout, held, wanted_layout, wanted, LAYERS, torch.tensor(slots))
    assert same(raw(wanted), expected)


@pytest.mark.parametrize("source", STOCK)
@pytest.mark.parametrize("target", STOCK)
@settings(deadline=None, max_examples=15)
@given(
    block_sizes=st.tuples(st.sampled_from([8, 16]), st.sampled_from([4, 8, 32])),
    kv_dtypes=st.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float16),
            (torch.float16, torch.bfloat16),
            (torch.float8_e4m3fn, torch.float8_e4m3fn),
        ]
    ),
    data=st.data(),
)
def test_slots_are_carried_to_others(
    source: str,
    target: str,
    block_sizes: tuple[int, int],
    kv_dtypes: tuple[torch.dtype, torch.dtype],
    data: st.DataObject,
) -> None:
    """Into blocks of another number and size, in another dtype: what arrives is rounded once, all else stays."""
    layouts = [
        STOCK[name](make_spec(4, 16, kv_dtype), block_size)
        for name, kv_dtype, block_size in zip((source, target), kv_dtypes, block_sizes, strict=True)
    ]
    held, wanted = (layout.allocate(BLOCKS, CPU) for layout in layouts)
    fill(wanted, seed=data.draw(st.integers(0, 9)))
    fill(held, seed=data.draw(st.integers(10, 19)))
    slots = data.draw(st.lists(st.integers(0, BLOCKS * block_sizes[0] - 1), max_size=9))
    room = st.lists(st.integers(block_sizes[1], BLOCKS * block_sizes[1] - 1), min_size=len(slots), unique=True)
    targets = [where if data.draw(st.booleans()) else -1 for where in data.draw(room)[: len(slots)]]
    everywhere = torch.arange(BLOCKS * block_sizes[1])
    before = [[bits(part) for part in layouts[1].read(wanted, layer, everywhere)] for layer in range(LAYERS)]
    kept = [index for index, where in enumerate(targets) if where >= 0]
    chosen, places = (torch.tensor(part, dtype=torch.int64) for part in (slots, targets))
    given = [layouts[0].read(held, layer, chosen) for layer in range(LAYERS)]
    translate(layouts[0], held, layouts[1], wanted, LAYERS, chosen, places)
    for layer in range(LAYERS):
        for was, new, now in zip(before[layer], given[layer], layouts[1].read(wanted, layer, everywhere), strict=True):
            for index in kept:
                was[targets[index]] = bits(new[index].to(kv_dtypes[1]))
            assert torch.equal(bits(now), was)


@settings(deadline=None)
@given(
    axes=st.tuples(*[st.sampled_from(ORDERS)] * 4),
    slots=st.lists(st.integers(0, 8 * BLOCKS - 1), unique=True, max_size=12),
)
def test_there_and_back(axes: tuple[str, str, str, str], slots: list[int]) -> None:
    """Between any two orders of axes, of keys and of values, every bit comes back."""
    one, two = (make_layout(*pair, (8, 8, 8), torch.float16) for pair in (axes[:2], axes[2:]))
    held, other, back = (layout.allocate(BLOCKS, CPU) for layout in (one, two, one))
    for seed, cache in enumerate((held, other, back)):
        fill(cache, seed)
    chosen = torch.tensor(slots, dtype=torch.int64)
    translate(one, held, two, other, LAYERS, chosen)
    translate(two, other, one, back, LAYERS, chosen)
    for layer in range(LAYERS):
        pairs = (one.read(cache, layer, chosen) for cache in (held, back))
        assert all(torch.equal(bits(was), bits(now)) for was, now in zip(*pairs, strict=True))


def layout_of(name: str) -> type[ReferenceBackend]:
    return type(name, (ReferenceBackend,), {"layout_type": STOCK[name], "contract": 1})


@pytest.mark.parametrize("source", STOCK)
@pytest.mark.parametrize("target", STOCK)
def test_one_backend_goes_on_where_another_was(source: str, target: str) -> None:
    """Blocks that one has filled are moved into the cache of the next, which attends to them; without it, it cannot."""
    configuration = Configuration(head_size=16, block_size=16, dtype=torch.float32, kv_dtype=torch.float32)
    first, second = (Stage(layout_of(name), configuration, DEVICE(), seed=7) for name in (source, target))
    first.run(first.step([(first.row(0), length) for length in (40, 5, 16)]))
    written = torch.tensor([slot for row in first.rows for slot in first._last_slots(row, len(row))])
    second.rows = first.rows
    second.generator.set_state(first.generator.get_state())
    second.cache._free = first.cache._free
    step = second.step([(row, 1) for row in first.rows] + [(second.row(0), 3)])
    second.write(step)
    plan = second.backend.plan(step.batch)
    with pytest.raises(Fault, match="not finite"):
        second.check(step, second.attend(step, plan))
    layouts = first.backend.layout, first.cache.cache, second.backend.layout, second.cache.cache
    translate(*layouts, configuration.layers, written)
    second.check(step, second.attend(step, plan))
