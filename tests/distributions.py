"""Distributions with real metadata, written into a folder, and plugins made of objects at hand."""

import itertools
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import torch

from octavo.attention.contract import AttentionBackend, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.hooks import hookimpl
from octavo.kv.layout import TOKEN_MAJOR
from octavo.plugins import Plugins

_counter = itertools.count()

BACKEND = """
import torch
from octavo import AttentionBackend, hookimpl
from octavo.attention.contract import Capabilities
from octavo.kv.layout import TOKEN_MAJOR

class Backend(AttentionBackend):
    name = "good"
    platform = "test"
    contract = 1
    capabilities = Capabilities(
        dtypes=(torch.float32,), kv_dtypes=(torch.float32,), head_sizes=(...,), block_sizes=(16, 32)
    )
    layout_type = TOKEN_MAJOR

    def attend(self, query, key, value, cache, plan, layer):
        return query

@hookimpl
def octavo_attention_backends():
    return [Backend]
"""
"""A plugin that is in order, as source text to be varied."""


def write_distribution(
    folder: Path, name: str, version: str, source: str = BACKEND, *, entry_points: str | None = None
) -> None:
    """A distribution as pip would leave it in `folder`, its one module registered as a plugin."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(dedent(source))
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points or f"[octavo]\n{module} = {module}\n")


def installed_in(folder: Path) -> Plugins:
    """The plugins of the distributions in `folder` alone; it must be on `sys.path`."""
    return Plugins(
        point for one in distributions(path=[str(folder)]) for point in one.entry_points.select(group="octavo")
    )


def plugins_of(*plugins: object) -> Plugins:
    """These objects as plugins, each of an entry point of its own."""
    module = ModuleType(f"plugins_at_hand_{next(_counter)}")
    sys.modules[module.__name__] = module
    points = []
    for index, plugin in enumerate(plugins):
        setattr(module, f"plugin{index}", plugin)
        points.append(EntryPoint(f"plugin{index}", f"{module.__name__}:plugin{index}", "octavo"))
    try:
        return Plugins(points)
    finally:
        del sys.modules[module.__name__]


class Offers:
    """A plugin that registers backends, and devices."""

    def __init__(self, backends: Iterable[Any] = (), devices: Iterable[Any] = ()) -> None:
        self.backends, self.devices = list(backends), list(devices)

    @hookimpl
    def octavo_attention_backends(self) -> list[Any]:
        return self.backends

    @hookimpl
    def octavo_devices(self) -> list[Any]:
        return self.devices


def capabilities(**changes: Any) -> Capabilities:
    """Plain float32 attention, any head size, in blocks of 16 or 32, unless changed."""
    plain: dict[str, Any] = {
        "dtypes": (torch.float32,),
        "kv_dtypes": (torch.float32,),
        "head_sizes": (...,),
        "block_sizes": (16, 32),
    }
    return Capabilities(**plain | changes)


def backend(
    name: str = "paged",
    platform: str = "test",
    *,
    unfit: str | None = None,
    can: Mapping[str, Any] | None = None,
    **members: Any,
) -> type[AttentionBackend]:
    """A backend class with this name; `unfit` is what its probe says, `can` changes its capabilities."""

    def attend(self: AttentionBackend, query: torch.Tensor, *_: object) -> torch.Tensor:
        return query

    def probe(cls: type[AttentionBackend], device: Device) -> str | None:
        return unfit

    stated = {
        "name": name,
        "platform": platform,
        "contract": 1,
        "capabilities": capabilities(**can or {}),
        "layout_type": TOKEN_MAJOR,
        "attend": attend,
        "probe": classmethod(probe),
    }
    return type(f"Backend_{platform}_{name}", (AttentionBackend,), stated | members)


def spec(**changes: Any) -> AttentionSpec:
    """A small group of layers, plain causal attention in float32 unless changed."""
    plain: dict[str, Any] = {
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 8,
        "scale": 0.5,
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
    }
    return AttentionSpec(**plain | changes)
