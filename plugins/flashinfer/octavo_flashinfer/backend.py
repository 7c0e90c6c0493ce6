"""`cuda/flashinfer`: rows that decode go to one wrapper of FlashInfer's, all others to another."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.kv.dtypes import Unmixed
from octavo.kv.layout import KVCache, LayoutType
from octavo_flashinfer.pages import Integers, Pages
from octavo_flashinfer.workspace import MOST_BYTES, MOST_ROWS, Workspace, needed
from octavo_triton.layout import TOKEN_MAJOR

if TYPE_CHECKING:
    from octavo_flashinfer.wrappers import Captured, Decoding, Prefill, Storage

logger = logging.getLogger(__name__)

_FLOATS = (torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLASHINFER = (0, 6, 14)
"""The oldest that it was tried with."""
_OLDEST = (8, 0)
_HOPPER = 9
"""Compute capabilities."""
_PREFILL = ("fa2", "fa3")
_MOST_PAGES = 1 << 22
"""Ids of a captured step, 16 MiB: with more of them, as only shared prefixes make, a step runs as it is."""
_TOLD_EVERY = 20.0
"""Seconds between two lines of a log that something is going on."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step: rows that decode, which come first, and the others; None where there are none."""

    decodes: int
    decoding: Decoding | Captured | None
    prefill: Prefill | None


@dataclass(frozen=True, slots=True, eq=False)
class CapturedPlan(Plan):
    """A step of a captured graph: all its rows decode."""

    decoding: Captured


class FlashInferBackend(AttentionBackend):
    """FlashInfer (arXiv 2501.01005) over token-major blocks, of one token unless asked for others."""

    name = "flashinfer"
    platform = "cuda"
    contract = 1
    priority = 5
    capabilities = Capabilities(
        dtypes=_FLOATS, kv_dtypes=(*_FLOATS, *_FLOAT8), head_sizes=(128, 64, 256),
        block_sizes=(1, 16, 32, 64), features=frozenset({"window", "softcap"}), graphs="decode", prefix_caching=True,
    )  # fmt: skip
    layout_type: ClassVar[LayoutType] = Unmixed(TOKEN_MAJOR, pairs=tuple(product(_FLOATS, _FLOAT8)))

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Builds the kernels, which takes minutes when they are wanted first. Option: `prefill`, "fa2" or "fa3"."""
        others = dict(options or {})
        wanted = others.pop("prefill", None)
        super().__init__(spec, block_size, device, others, sinks)
        prefill = self._prefill_kernel(wanted)
        from octavo_flashinfer import wrappers

        self._wrappers = wrappers
        least, most = (self._workspace_bytes(rows, prefill) for rows in (1, MOST_ROWS))
        workspace = Workspace.of(device.torch_device, max(least, min(most, MOST_BYTES)))
        self._layers = wrappers.Layers(spec, block_size, workspace, prefill)
        with _told("decoding"):
            self._decoding = wrappers.Decoding(self._layers)
        with _told("prompts"):
            self._prefill = wrappers.Prefill(self._layers)
        self._captured: dict[int, CapturedPlan | None] = {}
        """By bucket; None for one that is not captured."""
        self._storage: Storage | None = None
        self._sent: torch.cuda.Event | None = None
        """FlashInfer sends each plan from the same memory of the host: what is there must be gone before the next."""

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """A GPU of NVIDIA's, FlashInfer, and the compiler that makes its kernels."""
        if device.name != "cuda":
            return f"it runs on cuda, not on {device.name}"
        if find_spec("flashinfer") is None:
            return "FlashInfer is not installed: pip install 'octavo[flashinfer]'"
        if (found := _too_old()) is not None:
            return f"it needs FlashInfer {_dotted(_FLASHINFER)} or newer, {found} is installed"
        capability = torch.cuda.get_device_capability(device.torch_device)
        if capability < _OLDEST:
            return f"it needs compute capability {_dotted(_OLDEST)} or newer, this GPU has {_dotted(capability)}"
        if not _has_compiler():
            return (
                "FlashInfer compiles its kernels with nvcc, which is not found: install the CUDA toolkit and name its "
                "folder in CUDA_HOME"
            )
        return None

    def capability(self) -> int:
        """The major number of the GPU's compute capability."""
        return torch.cuda.get_device_capability(self.device.torch_device)[0]

    def count_processors(self) -> int:
        """Its multiprocessors."""
        return torch.cuda.get_device_properties(self.device.torch_device).multi_processor_count

    def _prefill_kernel(self, wanted: object) -> str:
        """As asked for, else the one for Hopper where it can be. Raises ValueError on what it cannot do."""
        able = self.capability() == _HOPPER and self.spec.kv_dtype.itemsize > 1
        if wanted is None:
            return "fa3" if able else "fa2"
        if wanted not in _PREFILL:
            raise ValueError(f"option prefill is {wanted!r}: {' or '.join(_PREFILL)}")
        if wanted == "fa3" and not able:
            raise ValueError("option prefill is fa3: it is for Hopper, and for caches of 16 bits. Say fa2")
        return str(wanted)

    def _workspace_bytes(self, rows: int, prefill: str) -> int:
        return needed(self.spec, rows, self.count_processors(), split_prompts=prefill == "fa2")

    def workspaces(self) -> Sequence[Tensor]:
        """The one that all groups of layers share."""
        return (self._layers.workspace.floats,)

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        """Share out the step's work, on the host: where core does not give lengths there, they are asked for once."""
        if self._sent is not None:
            self._sent.synchronize()
        starts, contexts = _on_host(batch)
        plan: Plan | None = None
        if bucket is not None and batch.decodes == batch.rows:
            plan = self._replayed(batch.block_table, contexts, bucket)
        plan = plan or self._made(batch, starts, contexts)
        if self.device.torch_device.type == "cuda":
            self._sent = self._sent or torch.cuda.Event()
            self._sent.record()
        return plan

    def _replayed(self, table: Tensor, contexts: Integers, bucket: int) -> Plan | None:
        """The bucket's, refreshed in place or made; None if it has no room for the step."""
        if bucket not in self._captured:
            self._captured[bucket] = self._captured_step(*table.shape)
        plan, pages = self._captured[bucket], Pages.of(contexts, self.block_size)
        if plan is None or plan.decodes != len(contexts) or (place := plan.decoding.room(pages.total)) is None:
            return None
        pages.gathered(table, np.arange(len(contexts), dtype=np.int32), place)
        plan.decoding.plan(pages)
        return plan

    def _captured_step(self, rows: int, width: int) -> CapturedPlan | None:
        """With a storage that is large enough: that of the first, largest bucket serves the others."""
        size, pages = self._workspace_bytes(rows, self._layers.prefill), min(rows * width, _MOST_PAGES)
        if size > max(MOST_BYTES, len(self._layers.workspace.floats)):
            return None
        device = self.device.torch_device
        if self._storage is None or not self._storage.holds(rows, pages):
            self._storage = self._wrappers.Storage.of(rows, pages, device)
        self._layers = replace(self._layers, workspace=Workspace.of(device, size))
        return CapturedPlan(rows, self._wrappers.Captured(self._layers, self._storage, rows), None)

    def _made(self, batch: AttentionBatch, starts: Integers, contexts: Integers) -> Plan:
        """Of a step that runs as it is."""
        table, decodes = batch.block_table, batch.decodes
        if decodes:
            pages = Pages.of(contexts[:decodes], self.block_size)
            self._decoding.plan(pages, pages.gathered(table, np.arange(decodes, dtype=np.int32)))
        # Rows without a query are none of FlashInfer's affair.
        others = (decodes + np.flatnonzero(np.diff(starts[decodes:]))).astype(np.int32)
        if len(others):
            pages = Pages.of(contexts[others], self.block_size)
            query_starts = torch.from_numpy(np.append(starts[others], starts[-1]) - starts[decodes])
            self._prefill.plan(query_starts, pages, pages.gathered(table, others), batch.max_query)
        return Plan(decodes, self._decoding if decodes else None, self._prefill if len(others) else None)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        """As the contract says; keys and values come from the cache, this step's too."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        keys, values = cache.keys[layer], cache.values[layer]
        if plan.decoding is not None:
            plan.decoding.run(query[: plan.decodes], keys, values, out[: plan.decodes])
        if plan.prefill is not None:
            plan.prefill.run(query[plan.decodes :], keys, values, out[plan.decodes :])
        return out


def _on_host(batch: AttentionBatch) -> tuple[Integers, Integers]:
    """query_starts [rows + 1] and context_lengths [rows], with one look at the device at most."""
    if batch.host_lengths is not None:
        return batch.host_lengths
    rows = batch.rows
    if batch.decodes == rows:
        return np.arange(rows + 1, dtype=np.int32), batch.context_lengths.cpu().numpy()
    both = torch.cat([batch.query_starts, batch.context_lengths]).cpu().numpy()
    return both[: rows + 1], both[rows + 1 :]


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Say in the log that kernels are being built, for as long as they are."""
    started, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(_TOLD_EVERY):
            taken = time.monotonic() - started
            logger.info("flashinfer: building the kernels for %s, which takes minutes once: %.0f s", what, taken)

    teller = threading.Thread(target=tell, name="octavo-flashinfer-build", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
    logger.info("flashinfer: the kernels for %s are ready, after %.1f s", what, time.monotonic() - started)


def _has_compiler() -> bool:
    """As FlashInfer looks for it."""
    homes = (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH"))
    home = next(filter(None, homes), "/usr/local/cuda")
    return "FLASHINFER_NVCC" in os.environ or shutil.which("nvcc") is not None or Path(home, "bin/nvcc").is_file()


def _too_old() -> str | None:
    """The version that is installed, if it is older than it should be."""
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:  # built from its sources under another name
        return None
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdecimal())
    return found if numbers < _FLASHINFER else None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
