"""A Triton backend's kernels for a GPU that is not here: it runs as it would there, and every launch compiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.attention.ahead import AheadOfTime, CompiledKernel, Expectation
from octavo.attention.contract import AttentionBatch, AttentionSpec
from octavo.attention.device import CPU, Device
from octavo.kv.layout import KVCache
from octavo_triton.chips import Chip
from octavo_triton.driver import Build, compiling
from octavo_triton.expected import expected, share_out
from octavo_triton.gpu import GPU, GPUBackend
from octavo_triton.plan import Plan
from octavo_triton.reachable import Configuration, configurations
from octavo_triton.resources import resources

_LARGE = 1 << 31
"""Bytes: to AMD's compiler, offsets within so many are another kind."""


class TritonKernels(AheadOfTime):
    """Tensors are on the CPU, and small: kernels depend on neither."""

    def __init__(self, backend: type[GPUBackend], chip: Chip) -> None:
        self.product = chip.product
        self.bytes_per_second = chip.bytes_per_second
        self._backend = backend
        self._chip = chip
        self._told: set[str] = set()
        """Kernels that `compile` has given, by their hashes."""

    def configurations(self, *, complete: bool) -> Sequence[str]:
        """As the contract says."""
        return list(map(str, configurations(self._backend, self._chip.architecture, complete=complete)))

    def compile(self, configuration: str, cache: Path) -> Sequence[CompiledKernel]:
        """As the contract says. Raises ValueError on a configuration that is not one of `configurations`."""
        known = {str(one): one for one in configurations(self._backend, self._chip.architecture, complete=True)}
        if configuration not in known:
            raise ValueError(f"{configuration} is none of the configurations: {', '.join(known)}")
        builds: list[Build] = []
        with compiling(self._chip, cache, builds.append):
            _launch_all(there(self._backend, known[configuration], self._chip), known[configuration], self._chip)
        new = [build for build in builds if build.hash not in self._told]
        self._told |= {build.hash for build in new}
        return [resources(build, configuration, self._chip) for build in new]

    def expect(self, spec: AttentionSpec, block_size: int, contexts: Sequence[int], cache: Path) -> Expectation:
        """As the contract says."""
        backend, batch = (
            there(self._backend, Configuration(spec, block_size), self._chip),
            batch_of([1] * len(contexts)),
        )
        builds: list[Build] = []
        with compiling(self._chip, cache, builds.append):
            work = step(backend, batch, cache_of(backend, small=False)).decodes
        (kernel,) = (resources(one, "", self._chip) for one in builds if one.name.endswith(".decode"))
        assert work is not None  # all of these rows decode
        parts = share_out(contexts, work.wanted, len(work.items), work.tile.keys)
        return expected(spec, contexts, parts, self._chip, kernel.programs)


def there(backend: type[GPUBackend], configuration: Configuration, chip: Chip) -> GPUBackend:
    """The backend as it would be on that chip."""

    class There(backend):  # type: ignore[misc,valid-type]
        @classmethod
        def gpu(cls, device: Device) -> GPU:
            return GPU(chip.architecture, chip.shared_bytes, chip.processors)

    spec = configuration.spec
    sinks = torch.zeros(spec.layers, spec.heads) if spec.sinks else None
    made: GPUBackend = There(spec, configuration.block_size, CPU(), sinks=sinks)
    return made


def _launch_all(backend: GPUBackend, configuration: Configuration, chip: Chip) -> None:
    """Every kernel of a step in which one row decodes and another does not, and of one in which many decode."""
    cache = cache_of(backend, small=configuration.small)
    for counts in ([1, 64], [1] * (chip.processors + 1)):
        step(backend, batch_of(counts), cache)


def cache_of(backend: GPUBackend, *, small: bool) -> KVCache:
    """Address space: nothing is written."""
    blocks = 1 if small else _LARGE // (backend.layout.block_bytes // 2) + 1
    return backend.layout.allocate(blocks, torch.device("cpu"))


def step(backend: GPUBackend, batch: AttentionBatch, cache: KVCache) -> Plan:
    """A step of one layer."""
    spec = backend.spec
    query = torch.empty(len(batch.slots), spec.heads, spec.head_size, dtype=spec.dtype)
    key = torch.empty(len(batch.slots), spec.kv_heads, spec.head_size, dtype=spec.dtype)
    backend.layout.write(cache, 0, key, key, batch.slots)
    plan = backend.plan(batch)
    backend.attend(query, key, key, cache, plan, 0)
    return plan


def batch_of(counts: Sequence[int]) -> AttentionBatch:
    """Rows of so many new tokens."""
    return AttentionBatch(
        query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
        context_lengths=torch.full((len(counts),), 100, dtype=torch.int32),
        block_table=torch.zeros(len(counts), 100, dtype=torch.int32),
        slots=torch.zeros(sum(counts), dtype=torch.int64),
        max_query=max(counts),
        max_context=100,
        decodes=counts.count(1),
    )
