"""Devices as objects: what octavo needs to know of a machine's accelerator, with no `if platform` anywhere else."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch


class Memory(NamedTuple):
    """Bytes of a device's memory."""

    free: int
    total: int


class Device(ABC):
    """One kind of device. Others than these arrive through the hook `octavo_devices`."""

    name: ClassVar[str]
    """Its word in `DEVICE`, e.g. "cuda"."""
    priority: ClassVar[int] = 0
    """The highest that is available is chosen when the user names none."""

    @classmethod
    @abstractmethod
    def unavailable(cls) -> str | None:
        """Why this machine has none, in a sentence, or None. Never raises, never slow."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where tensors go."""

    @abstractmethod
    def memory(self) -> Memory:
        """Free and total bytes now."""

    def synchronize(self) -> None:
        """Wait until everything submitted has run; a device that runs at once has nothing to wait for."""
        return

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """Record `run` once and return its replay, or None where the device cannot."""
        return None


class CPU(Device):
    """The host's processor and memory."""

    name = "cpu"

    @classmethod
    def unavailable(cls) -> str | None:
        """Never: every machine has one."""
        return None

    @property
    def torch_device(self) -> torch.device:
        """torch.device("cpu")."""
        return torch.device("cpu")

    def memory(self) -> Memory:
        """What can be taken without swapping, and all there is; a container's limit counts where there is one."""
        free, total = _host_memory()
        try:
            limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        except (OSError, ValueError):  # no control group, or no limit ("max")
            return Memory(free, total)
        return Memory(min(free, max(limit - used, 0)), min(total, limit))


_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def _host_memory() -> tuple[int, int]:
    """Bytes available and in all; where the system does not say what is available, all of it."""
    try:
        lines = (line.split(":") for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        kibibytes = {name: int(rest.split()[0]) for name, rest in lines}
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    return kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024


class CUDA(Device):
    """An NVIDIA GPU, or an AMD one (`HIP`), through torch.cuda."""

    name = "cuda"
    priority = 10

    @classmethod
    def unavailable(cls) -> str | None:
        """PyTorch's build and the driver decide."""
        if torch.version.hip is not None:
            return f"this PyTorch ({torch.__version__}) is built for ROCm"
        return _unavailable_gpu(torch.version.cuda, "CUDA")

    @property
    def torch_device(self) -> torch.device:
        """The process's current GPU."""
        return torch.device("cuda", torch.cuda.current_device())

    def memory(self) -> Memory:
        """As the driver reports it."""
        return Memory(*torch.cuda.mem_get_info(self.torch_device))

    def synchronize(self) -> None:
        """Wait for the current GPU."""
        torch.cuda.synchronize()

    def capture(self, run: Callable[[], None]) -> Callable[[], None] | None:
        """A CUDA graph (HIP graph on AMD) of `run`; it must have run once before, so that nothing is made in it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


class HIP(CUDA):
    """An AMD GPU: PyTorch speaks to it through torch.cuda."""

    name = "rocm"

    @classmethod
    def unavailable(cls) -> str | None:
        """PyTorch's build and the driver decide."""
        return _unavailable_gpu(torch.version.hip, "ROCm")


class XPU(Device):
    """An Intel GPU through torch.xpu."""

    name = "xpu"
    priority = 5

    @classmethod
    def unavailable(cls) -> str | None:
        """PyTorch's build and the driver decide."""
        return None if torch.xpu.is_available() else "PyTorch sees no Intel GPU (torch.xpu.is_available() is False)"

    @property
    def torch_device(self) -> torch.device:
        """The process's current XPU."""
        return torch.device("xpu", torch.xpu.current_device())

    def memory(self) -> Memory:
        """As the driver reports it."""
        return Memory(*torch.xpu.mem_get_info(self.torch_device))

    def synchronize(self) -> None:
        """Wait for the current XPU."""
        torch.xpu.synchronize()


def _unavailable_gpu(build: str | None, platform: str) -> str | None:
    if build is None:
        return f"this PyTorch ({torch.__version__}) is built without {platform}"
    return None if torch.cuda.is_available() else f"PyTorch sees no {platform} device: no card, or no driver for it"


BUILT_IN: tuple[type[Device], ...] = (CPU, CUDA, HIP, XPU)
