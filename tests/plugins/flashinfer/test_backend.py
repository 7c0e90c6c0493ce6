"""What FlashInfer is told and given, and when a captured step is to be replayed."""

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import octavo_flashinfer.backend
from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.attention.device import CPU
from octavo_flashinfer.workspace import MOST_ROWS
from tests.plugins.flashinfer import library
from tests.plugins.flashinfer.on_cpu import OnCPU

SPEC = AttentionSpec(
    layers=1, heads=4, kv_heads=2, head_size=64, scale=0.1, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
)


def made(block_size: int = 1, options: Any = None, **changes: Any) -> OnCPU:
    return OnCPU(replace(SPEC, **changes), block_size, CPU(), options)


def decodes(contexts: list[int], block_size: int = 1, width: int = 0) -> AttentionBatch:
    """Rows in blocks of their own, as a captured step has them."""
    most = max(width, *(-(-context // block_size) for context in contexts), 1)
    rows = len(contexts)
    return AttentionBatch(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        block_table=torch.arange(1, rows * most + 1, dtype=torch.int32).view(rows, most),
        slots=torch.full((rows,), -1),
        max_query=1,
        max_context=max(contexts),
        decodes=rows,
    )


def wrappers(graph: bool = False) -> tuple[library.Wrapper, ...]:
    return tuple(wrapper for wrapper in library.Wrapper.made if wrapper.graph == graph)


def test_kernels_are_there_before_the_first_step() -> None:
    made()
    decoding, prefill = wrappers()
    assert decoding.told
    assert prefill.told


@pytest.mark.parametrize(("window", "left"), [(None, -1), (1, 0), (5, 4)])
def test_a_window_counts_the_querys_own_key(window: int | None, left: int) -> None:
    made(window=window)
    assert [wrapper.told["window_left"] for wrapper in wrappers()] == [left, left]


def test_with_a_soft_cap_it_is_flashinfers_own_attention() -> None:
    made(softcap=30.0)
    assert {(each.told["logits_soft_cap"], each.told["sm_scale"]) for each in wrappers()} == {(30.0, 0.1)}
    assert [wrapper.variant for wrapper in wrappers()] == [None, None]


@pytest.mark.parametrize("changes", [{}, {"window": 5}, {"kv_dtype": torch.float8_e4m3fn}, {"head_size": 128}])
def test_one_variant_is_compiled_for_decoding_and_for_prompts(changes: Any) -> None:
    """Of one kernel; what else there is has another name, which the stand-in looks at."""
    made(options={"prefill": "fa2"}, **changes)
    decoding, prefill = wrappers()
    assert decoding.variant is not None
    assert prefill.variant is not None
    assert vars(decoding.variant) == vars(prefill.variant)


@pytest.mark.parametrize(
    ("cache", "options", "kernel"),
    [
        (torch.bfloat16, None, "fa3"),
        (torch.float8_e4m3fn, None, "fa2"),
        (torch.bfloat16, {"prefill": "fa2"}, "fa2"),
        (torch.bfloat16, {"prefill": "fa3"}, "fa3"),
    ],
)
def test_the_kernel_for_prompts(cache: torch.dtype, options: Any, kernel: str) -> None:
    made(kv_dtype=cache, options=options)
    prefill = wrappers()[1]
    assert isinstance(prefill, library.BatchPrefillWithPagedKVCacheWrapper)
    assert prefill.backend == kernel


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="option prefill is 'fa4': fa2 or fa3"):
        made(options={"prefill": "fa4"})
    with pytest.raises(ValueError, match="caches of 16 bits"):
        made(options={"prefill": "fa3"}, kv_dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="takes no such option: splits"):
        made(options={"splits": 4})


def test_a_cache_of_the_other_float_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a cache of torch\.float16 is not for queries of torch\.bfloat16"):
        made(kv_dtype=torch.float16)


def test_groups_of_layers_share_a_workspace() -> None:
    first, second = made(), made(window=5)
    assert len({wrapper.floats.data_ptr() for wrapper in wrappers()}) == 1
    third = made(heads=64, kv_heads=2)  # wants more than there is
    assert len({wrapper.floats.data_ptr() for wrapper in wrappers()}) == 2
    told = [tensor for backend in (first, second) for tensor in backend.workspaces()]
    assert {tensor.data_ptr() for tensor in told} == {wrappers()[0].floats.data_ptr()}
    assert third.workspaces()[0] is wrappers()[-1].floats


@pytest.mark.parametrize("heads", [2, 4, 8, 14, 40])
@pytest.mark.parametrize("rows", [1, 2, 7, 33, MOST_ROWS, MOST_ROWS + 90])
def test_the_workspace_is_large_enough_for_captured_steps(heads: int, rows: int) -> None:
    backend = made(heads=heads)
    plan = backend.plan(decodes([3] * rows), rows)  # the stand-in computes what FlashInfer's plan takes
    assert backend.plan(decodes([5] * rows), rows) is not plan  # it has only room for tables as wide as the first
    assert backend.plan(decodes([2] * rows), rows) is plan


def test_a_step_that_wants_a_huge_workspace_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo_flashinfer.backend, "MOST_BYTES", 1 << 22)
    backend = made(heads=16)
    assert {len(wrapper.floats) for wrapper in wrappers()} == {1 << 22}
    assert backend.plan(decodes([3] * 500), 500) is not backend.plan(decodes([3] * 500), 500)
    assert backend.plan(decodes([3] * 20), 20) is backend.plan(decodes([3] * 20), 20)


def test_captured_sizes_share_what_graphs_read() -> None:
    backend = made()
    plans = [backend.plan(decodes([3] * rows, width=9), rows) for rows in (8, 4, 1)]
    assert len({plan.decoding for plan in plans}) == 3
    first, *others = wrappers(graph=True)
    assert {wrapper.integers.data_ptr() for wrapper in others} == {first.integers.data_ptr()}
    for wrapper in others:
        for held, largest in zip(wrapper.buffers, first.buffers, strict=True):
            assert held is not None
            assert largest is not None
            assert held.data_ptr() == largest.data_ptr()
    again = [backend.plan(decodes([9] * rows), rows) for rows in (1, 8, 4)]
    assert again == [plans[2], plans[0], plans[1]]


def test_more_pages_than_a_graph_has_room_for_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octavo_flashinfer.backend, "_MOST_PAGES", 20)
    backend = made()
    plan = backend.plan(decodes([3, 4], width=30), 2)
    eager = backend.plan(decodes([15, 6]), 2)
    assert eager is not plan
    assert eager.decoding is not plan.decoding
    assert backend.plan(decodes([14, 6]), 2) is plan


def test_a_step_with_prompts_is_not_replayed() -> None:
    backend = made()
    plan = backend.plan(decodes([3, 4], width=9), 2)
    mixed = replace(
        decodes([3, 4], width=9), query_starts=torch.tensor([0, 1, 4], dtype=torch.int32), max_query=3, decodes=1
    )
    assert backend.plan(mixed, 2) is not plan
    assert backend.plan(decodes([3, 4], width=9), 2) is plan


def test_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "prompts, which takes minutes" in record.getMessage():
                told.set()

    class Slow(library.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *arguments: Any, **named: Any) -> None:
            assert told.wait(60)
            super().plan(*arguments, **named)

    import flashinfer  # type: ignore[import-not-found, unused-ignore]

    monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Slow)
    monkeypatch.setattr(octavo_flashinfer.backend, "_TOLD_EVERY", 0.01)
    heard = Heard()
    octavo_flashinfer.backend.logger.addHandler(heard)
    with caplog.at_level(logging.INFO, logger=octavo_flashinfer.backend.logger.name):
        made()
    octavo_flashinfer.backend.logger.removeHandler(heard)
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("flashinfer: building the kernels for prompts, which takes minutes") for line in lines)
    assert [line.split(", after")[0] for line in lines if ", after" in line] == [
        "flashinfer: the kernels for decoding are ready",
        "flashinfer: the kernels for prompts are ready",
    ]
