"""The backends that are installed, each with the reasons why it cannot serve a model on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.attention.contract import AttentionBackend, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.attention.installed import backends
from octavo.plugins import Plugins, Registered, describe

WITHOUT = "it cannot start a query behind keys that an earlier step wrote"
"""What a backend says that has no `prefix_caching`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An installed backend, and why it cannot serve this model on this device."""

    backend: type[AttentionBackend]
    distribution: str
    version: str
    reasons: tuple[str, ...]
    """None: it can."""
    block_size: int | None
    """What it would be used with, tokens; None where no size fits."""
    capabilities: Capabilities
    """What it can do on this device; where it cannot run, what it declares."""

    @property
    def name(self) -> str:
        """As `platform/name`."""
        return self.backend.qualified_name()

    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}".rstrip()
        return f"{self.name} ({origin}): {'; '.join(self.reasons) or 'can run'}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "priority": self.backend.priority,
            "caution": self.backend.caution,
            "block_size": self.block_size,
            "reasons": list(self.reasons),
        }


def survey(
    specs: Sequence[AttentionSpec],
    device: Device,
    *,
    block_size: int | None = None,
    prefix_caching: bool | None = None,
    plugins: Plugins,
) -> tuple[Candidate, ...]:
    """Every installed backend with the reasons against it, highest priority first.

    Without specs only `device` speaks against one. `prefix_caching=True`: a backend that cannot is out.
    """
    candidates = [_candidate(one, specs, device, block_size, bool(prefix_caching)) for one in backends(plugins)]
    return tuple(sorted(candidates, key=lambda candidate: -candidate.backend.priority))


def _candidate(
    one: Registered[AttentionBackend],
    specs: Sequence[AttentionSpec],
    device: Device,
    block_size: int | None,
    prefix_caching: bool,
) -> Candidate:
    reasons = [one.conflict] if one.conflict else []
    size, able = None, one.kind.capabilities
    try:
        if unfit := one.kind.probe(device):
            reasons.append(unfit)
        else:
            able = one.kind.capabilities_on(device)
        if prefix_caching and not able.prefix_caching:
            reasons.append(f"prefix caching is asked for, and {WITHOUT}")
        for spec in specs:
            reasons += able.refusals(spec, block_size)
        size, why = _fitting(one.kind, able, specs, block_size)
        reasons += [] if size else why
    except Exception as error:
        reasons.append(f"it raises when asked: {describe(error)}")
    origin = one.origin
    return Candidate(one.kind, origin.distribution, origin.version, tuple(dict.fromkeys(reasons)), size, able)


def _fitting(
    backend: type[AttentionBackend], able: Capabilities, specs: Sequence[AttentionSpec], block_size: int | None
) -> tuple[int | None, list[str]]:
    """The first block size that it takes for all groups; else None and what is wrong with the first one tried."""
    refused: list[str] = []
    for size in sizes(able, block_size):
        wrong = [reason for spec in specs for reason in _refusals(backend, able, spec, size)]
        if not wrong:
            return size, []
        refused = refused or wrong
    return None, refused


def sizes(capabilities: Capabilities, block_size: int | None) -> list[int]:
    """The block sizes to try: the one that was asked for, or those that the backend states, preferred first."""
    if block_size is not None:
        return [block_size]
    return [size for size in capabilities.block_sizes if isinstance(size, int)] or [capabilities.preferred_block_size]


def _refusals(backend: type[AttentionBackend], able: Capabilities, spec: AttentionSpec, block_size: int) -> list[str]:
    refusals = able.refusals(spec, block_size)
    if not refusals:
        try:
            backend.layout_type(spec, block_size)
        except ValueError as error:
            refusals = [f"it has no layout for blocks of {block_size}: {error}"]
    return refusals
