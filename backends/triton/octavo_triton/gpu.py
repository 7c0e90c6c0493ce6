"""A backend for one maker's GPUs: what it knows of them lies in tables beside it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from octavo.attention.ahead import AheadOfTime
from octavo.attention.contract import Capabilities
from octavo.attention.device import Device
from octavo_triton.backend import TritonBackend
from octavo_triton.chips import chips
from octavo_triton.tuning import Tuning, tuned

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 16, 32)


def capabilities(block_size: int, caches: tuple[torch.dtype, ...]) -> Capabilities:
    """What the kernels can do on every GPU, with caches of floats and of these dtypes."""
    return Capabilities(
        dtypes=FLOATS, kv_dtypes=(*FLOATS, *caches), head_sizes=_HEAD_SIZES, block_sizes=(block_size, ...),
        features=frozenset({"window", "softcap", "sinks"}), graphs="decode", prefix_caching=True,
        batch_invariant=True,
    )  # fmt: skip


class GPU(NamedTuple):
    """What a backend asks of the device that is there."""

    architecture: str
    """As the tables call it."""
    shared_bytes: int
    """What one program may take of a processor's shared memory."""
    processors: int


class GPUBackend(TritonBackend):
    """Its tiles come from `tuning.json` in `folder`, what is known of GPUs that are not here from `chips.json`."""

    folder: ClassVar[Path]
    waiting: ClassVar[int] = 0
    """Of the tiles on their way from memory, those that the compiler has wait in registers."""

    @classmethod
    @abstractmethod
    def gpu(cls, device: Device) -> GPU:
        """What the driver says of a device on which it can run."""

    @classmethod
    def missing(cls, architecture: str) -> Collection[torch.dtype]:
        """Dtypes of a cache that it declares, and that Triton cannot convert on that architecture."""
        return ()

    @classmethod
    def capabilities_for(cls, architecture: str) -> Capabilities:
        """What it can do on GPUs of that architecture."""
        missing = cls.missing(architecture)
        kept = tuple(dtype for dtype in cls.capabilities.kv_dtypes if dtype not in missing)
        return replace(cls.capabilities, kv_dtypes=kept, chip=architecture if missing else "")

    @classmethod
    def capabilities_on(cls, device: Device) -> Capabilities:
        """Without caches that the GPU has no conversion for."""
        return cls.capabilities_for(cls.gpu(device).architecture)

    def tune(self) -> Tuning:
        """As the table says, cut down to the spec's sizes."""
        gpu = self.gpu(self.device)
        table = self.folder / "tuning.json"
        return tuned(table, self.name, self.spec, gpu.architecture, gpu.shared_bytes, self.waiting)

    def count_processors(self) -> int:
        """Its multiprocessors, its compute units."""
        return self.gpu(self.device).processors

    @classmethod
    def ahead(cls) -> Mapping[str, AheadOfTime]:
        """For the architectures in `chips.json`. Raises ImportError where Triton is missing, too old, or interprets."""
        if reason := TritonBackend.triton_fault():
            raise ImportError(reason)
        from triton import knobs

        if knobs.runtime.interpret:
            raise ImportError("TRITON_INTERPRET is set, with which Triton compiles nothing: unset it")
        from octavo_triton.ahead import TritonKernels

        return {name: TritonKernels(cls, chip) for name, chip in chips(cls.folder / "chips.json").items()}
