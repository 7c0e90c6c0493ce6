"""What docs/contract.md promises of number 1: a backend that was written for it goes on working.

A test that fails here says that the number must be raised, or the change be made another way.
"""

from dataclasses import MISSING, fields
from inspect import Parameter, signature
from typing import Any, get_args

import pytest

from octavo.attention import contract
from octavo.attention.contract import CONTRACT, AttentionBackend, AttentionBatch, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.kv.layout import KVCache, KVCacheLayout

# What had to be given or written when the number was made, and what could be left out.
FIELDS: dict[type[Any], tuple[str, str]] = {
    AttentionSpec: (
        "layers heads kv_heads head_size scale dtype kv_dtype",
        "window softcap sinks alibi_slopes batch_invariant",
    ),
    AttentionBatch: ("query_starts context_lengths block_table slots max_query max_context decodes", ""),
    Capabilities: (
        "dtypes kv_dtypes head_sizes block_sizes",
        "features graphs prefix_caching batch_invariant spare_slots chip",
    ),
    KVCache: ("keys values", ""),
}
MEMBERS: dict[type[Any], tuple[str, str]] = {
    AttentionBackend: (
        "attend",
        "qualified_name refuse probe capabilities_on workspaces ahead plan priority caution tunables",
    ),
    KVCacheLayout: ("block_bytes allocate write read copy_blocks", ""),
    Device: (
        "unavailable torch_device memory",
        "priority captures asynchronous synchronize peak limit graph_pool capture",
    ),
}
CALLS: dict[tuple[type[Any], str], str] = {
    (AttentionBackend, "__init__"): "spec block_size device options=None sinks=None",
    (AttentionBackend, "probe"): "device",
    (AttentionBackend, "capabilities_on"): "device",
    (AttentionBackend, "plan"): "batch bucket=None",
    (AttentionBackend, "attend"): "query key value cache plan layer",
    (KVCacheLayout, "allocate"): "num_blocks device",
    (KVCacheLayout, "write"): "cache layer key value slots",
    (KVCacheLayout, "read"): "cache layer slots",
    (KVCacheLayout, "copy_blocks"): "cache sources targets",
}


def test_the_number_that_these_tests_are_about() -> None:
    """Another one has promises of its own."""
    assert CONTRACT == 1


@pytest.mark.parametrize("kind", FIELDS)
def test_fields_stay_and_new_ones_have_defaults(kind: type[Any]) -> None:
    needed, optional = (set(names.split()) for names in FIELDS[kind])
    given = {field.name: field.default is MISSING and field.default_factory is MISSING for field in fields(kind)}
    assert {name for name, without in given.items() if without} == needed
    assert optional <= given.keys()


@pytest.mark.parametrize("kind", MEMBERS)
def test_nothing_more_must_be_written(kind: type[Any]) -> None:
    needed, optional = (set(names.split()) for names in MEMBERS[kind])
    assert kind.__abstractmethods__ == needed
    assert {name for name in optional if not hasattr(kind, name)} == set()


@pytest.mark.parametrize(("kind", "name"), CALLS)
def test_what_a_backend_is_called_with_stays(kind: type[Any], name: str) -> None:
    """An override with these parameters is what number 1 asks for: not one more is handed over."""
    parameters = [one for one in signature(getattr(kind, name)).parameters.values() if one.name != "self"]
    shown = [one.name if one.default is Parameter.empty else f"{one.name}={one.default}" for one in parameters]
    assert shown == CALLS[kind, name].split()


@pytest.mark.parametrize("kind", MEMBERS)
def test_underscores_are_the_backends(kind: type[Any]) -> None:
    private = {name for name in vars(kind) if name.startswith("_") and not name.startswith(("__", "_abc_"))}
    assert private == set()


def test_features_stay() -> None:
    assert {"window", "softcap", "sinks", "alibi"} <= set(get_args(contract.Feature))
