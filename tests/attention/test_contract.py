"""The contract's types: what they refuse, what a backend's declaration lets through, and what a base class does."""

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec, Capabilities
from octavo.attention.device import CPU
from octavo.kv.layout import PACKED, TOKEN_MAJOR

SPEC = AttentionSpec(
    layers=2, heads=8, kv_heads=2, head_size=64, scale=0.125, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
)
NARROW = Capabilities(
    dtypes=(torch.bfloat16, torch.float16), kv_dtypes=(torch.bfloat16,), head_sizes=(64, 128), block_sizes=(32, 16)
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Backend(AttentionBackend):
    name, platform, contract = "some", "test", 1
    capabilities = NARROW
    layout_type = PACKED

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Any, plan: Any, layer: int) -> Tensor:
        return query


@pytest.mark.parametrize(
    ("given_values", "message"),
    [
        ({"layers": 0}, "layers is 0, it must be at least 1"),
        ({"heads": -8}, "heads is -8"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"head_size": 0}, "head_size is 0"),
        ({"kv_heads": 3}, "8 query heads cannot share 3 key heads"),
        ({"kv_heads": 16}, "8 query heads cannot share 16 key heads"),
        ({"window": 0}, "window is 0, it must be at least 1"),
        ({"alibi_slopes": (0.5,) * 2}, r"slopes are \(0.5, 0.5\), it must be 8 finite numbers"),
        ({"alibi_slopes": (0.5,) * 7 + (math.nan,)}, "slopes are .*nan.*, it must be 8 finite numbers"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(given_values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **given_values)


@pytest.mark.parametrize(("heads", "kv_heads", "group"), [(8, 8, 1), (8, 2, 4), (8, 1, 8)])
def test_group_is_the_query_heads_of_a_key_head(heads: int, kv_heads: int, group: int) -> None:
    assert replace(SPEC, heads=heads, kv_heads=kv_heads).group == group


def test_features_are_what_a_group_needs() -> None:
    assert SPEC.features == frozenset()
    assert replace(SPEC, window=4096).features == {"window"}
    assert replace(SPEC, alibi_slopes=(0.5,) * SPEC.heads).features == {"alibi"}
    assert replace(SPEC, window=1, softcap=50.0, sinks=True).features == {"window", "softcap", "sinks"}


def test_spec_and_capabilities_cannot_be_changed() -> None:
    for frozen, field in ((SPEC, "heads"), (NARROW, "graphs")):
        with pytest.raises(FrozenInstanceError):
            setattr(frozen, field, 1)


def test_rows_of_a_batch() -> None:
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1, 5], dtype=torch.int32),
        context_lengths=torch.tensor([9, 4], dtype=torch.int32),
        block_table=torch.zeros(2, 3, dtype=torch.int32),
        slots=torch.zeros(5, dtype=torch.int64),
        max_query=4,
        max_context=9,
        decodes=1,
    )
    assert batch.rows == 2


@pytest.mark.parametrize(
    ("asked", "block_size", "refusal"),
    [
        ({"dtype": torch.float32}, 16, "dtype float32 is not supported: it takes bfloat16, float16"),
        ({"kv_dtype": torch.float8_e5m2}, 16, "cache dtype float8_e5m2 is not supported: it takes bfloat16"),
        ({"head_size": 80}, 16, "head size 80 is not supported: it takes 64, 128"),
        ({}, 64, "block size 64 is not supported: it takes 32, 16"),
        ({"window": 4096}, 16, "the model needs window 4096: it supports none"),
        ({"softcap": 50.0}, 16, "the model needs softcap 50.0: it supports none"),
        ({"sinks": True}, 16, "the model needs sinks: it supports none"),
        ({"alibi_slopes": (0.5,) * SPEC.heads}, 16, "the model needs alibi: it supports none"),
        (
            {"batch_invariant": True},
            16,
            "deterministic is asked for: with it a token's bits depend on what else is in its batch",
        ),
    ],
)
def test_a_refusal_names_value_and_limit(asked: dict[str, Any], block_size: int, refusal: str) -> None:
    assert NARROW.refusals(replace(SPEC, **asked), block_size) == [refusal]


def test_every_refusal_is_given_at_once() -> None:
    asked = replace(SPEC, dtype=torch.float32, head_size=80, softcap=50.0, sinks=True)
    assert [refusal.split()[0] for refusal in NARROW.refusals(asked, 1)] == ["dtype", "head", "block", "the", "the"]


@given(
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(DTYPES),
    head_size=st.integers(1, 256),
    block_size=st.none() | st.integers(1, 256),
    features=st.sets(st.sampled_from(["window", "softcap", "sinks"])),
    declared=st.builds(
        Capabilities,
        dtypes=st.lists(st.sampled_from(DTYPES)).map(tuple),
        kv_dtypes=st.lists(st.sampled_from(DTYPES)).map(tuple),
        head_sizes=st.lists(st.integers(1, 256) | st.just(...)).map(tuple),
        block_sizes=st.lists(st.integers(1, 256) | st.just(...)).map(tuple),
        features=st.frozensets(st.sampled_from(["window", "softcap", "sinks"])),
    ),
)
def test_what_is_not_declared_is_refused(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_size: int,
    block_size: int | None,
    features: set[str],
    declared: Capabilities,
) -> None:
    values = {"window": 5, "softcap": 30.0, "sinks": True}
    given_features = {name: values[name] for name in features}
    spec = replace(SPEC, dtype=dtype, kv_dtype=kv_dtype, head_size=head_size, **given_features)  # type: ignore[arg-type]
    lacking = [
        dtype not in declared.dtypes,
        kv_dtype not in declared.kv_dtypes,
        head_size not in declared.head_sizes and ... not in declared.head_sizes,
        block_size is not None and block_size not in declared.block_sizes and ... not in declared.block_sizes,
        *(name not in declared.features for name in features),
    ]
    assert len(declared.refusals(spec, block_size)) == sum(lacking)


def test_any_other_size_is_not_any_number() -> None:
    anything = replace(NARROW, head_sizes=(...,), block_sizes=(16, ...))
    assert anything.refusals(replace(SPEC, head_size=123), 7) == []
    assert anything.refusals(SPEC, 0) == ["block size 0 is not supported: it takes 16, any other"]
    assert anything.refusals(SPEC, -16) == ["block size -16 is not supported: it takes 16, any other"]


def test_a_backend_that_declares_nothing_supports_nothing() -> None:
    nothing = Capabilities(dtypes=(), kv_dtypes=(), head_sizes=(), block_sizes=())
    assert len(nothing.refusals(SPEC, 16)) == 4
    assert nothing.refusals(SPEC, 16)[0].endswith("it takes none")
    assert (nothing.graphs, nothing.prefix_caching, nothing.batch_invariant) == ("none", False, False)


@pytest.mark.parametrize(("declared", "preferred"), [((32, 16), 32), ((..., 64), 16), ((...,), 16), ((1,), 1)])
def test_the_preferred_block_size_is_the_first(declared: tuple[Any, ...], preferred: int) -> None:
    assert replace(NARROW, block_sizes=declared).preferred_block_size == preferred


def test_a_backend_makes_its_layout() -> None:
    sinks = torch.zeros(2, 8)
    backend = Backend(SPEC, 32, CPU(), {}, sinks)
    assert backend.layout == PACKED(SPEC, 32) != TOKEN_MAJOR(SPEC, 32)
    assert (backend.spec, backend.block_size, backend.sinks) == (SPEC, 32, sinks)
    assert Backend.qualified_name() == "test/some"
    assert Backend.probe(CPU()) is None


def test_the_plan_is_the_batch_unless_a_backend_makes_one() -> None:
    batch: Any = object()
    assert Backend(SPEC, 32, CPU()).plan(batch) is batch


def test_options_that_nobody_takes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="test/some takes no such option: splits, workspace"):
        Backend(SPEC, 32, CPU(), {"workspace": "1g", "splits": 4})


def test_a_backend_without_attend_cannot_be_made() -> None:
    class Incomplete(AttentionBackend):
        name, platform, contract = "none", "test", 1
        capabilities = NARROW
        layout_type = TOKEN_MAJOR

    with pytest.raises(TypeError, match="attend"):
        Incomplete(SPEC, 32, CPU())  # type: ignore[abstract]
