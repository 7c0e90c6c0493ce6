"""Devices as objects: what octavo needs to know of a machine's accelerator, with no `if platform` anywhere else."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

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
    captures: ClassVar[bool] = False
    """Does `capture` give replays?"""
    asynchronous: ClassVar[bool] = False
    """Does it compute what it is given one after another while Python goes on, so that a step can be prepared?"""

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

    def peak(self, run: Callable[[], None]) -> int:
        """Run it; returns the most bytes of this device's memory that it held beyond what was in use before.

        Here: what is no longer free afterwards, for devices whose allocator keeps what it once had.
        """
        free = self.memory().free
        run()
        self.synchronize()
        return max(free - self.memory().free, 0)

    def limit(self, fraction: float) -> bool:
        """Let this process take that share of the memory at most; `memory` tells from then on what is left of it.

        False where the device has no way to do so, and nothing has changed.
        """
        return False

    def graph_pool(self) -> Any:
        """Memory that several captures share: what `capture` is given with each of them."""
        return None

    def capture(self, run: Callable[[], None], pool: Any = None) -> Callable[[], None] | None:
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

    def peak(self, run: Callable[[], None]) -> int:
        """By the most pages that the process had resident (VmHWM), which the kernel lets itself be told to forget.

        PyTorch keeps no count of a CPU's memory, and would not see what kernels take besides. Where the count cannot
        be reset, it is the highest since the process began, and so more than the truth. Without /proc it is what that
        highest has grown by, and may be less.
        """
        _trim()
        with suppress(OSError):
            (_PROCESS / "clear_refs").write_text("5")
        before = _resident("VmRSS")
        run()
        return max(_resident("VmHWM") - before, 0)


_PROCESS = Path("/proc/self")
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


def _resident(name: str) -> int:
    """Bytes that the process has in memory: VmRSS now, VmHWM at most; where the system does not tell, at most."""
    try:
        line = next(one for one in (_PROCESS / "status").read_text().splitlines() if one.startswith(name))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(line.split()[1]) * 1024


def _trim() -> None:
    """Have the allocator return what it keeps for later: taken from there, memory would not show."""
    with suppress(OSError, AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


def _peak(statistics: Any, device: Device, run: Callable[[], None]) -> int:
    """Of a device that PyTorch's caching allocator serves: what that reserved, or what the driver gave in all."""
    statistics.empty_cache()
    statistics.reset_peak_memory_stats()
    free, reserved = device.memory().free, statistics.memory_reserved()
    run()
    device.synchronize()
    most = max(statistics.max_memory_reserved() - reserved, free - device.memory().free)
    statistics.empty_cache()
    return int(most)


class CUDA(Device):
    """An NVIDIA GPU, or an AMD one (`HIP`), through torch.cuda."""

    name = "cuda"
    priority = 10
    captures = True
    asynchronous = True
    _most: int | None = None
    """Bytes that this process may take, by `limit`."""
    _withheld: int = 0
    """Of them that were free by then: bytes that are not for this process."""

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
        """As the driver reports it, and no more than `limit` leaves: what the allocator does not see counts too."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        if self._most is not None:
            left = self._most - torch.cuda.memory_reserved(self.torch_device)
            free = max(min(free - self._withheld, left), 0)
        return Memory(free, total)

    def limit(self, fraction: float) -> bool:
        """The caching allocator obeys it; what drivers and libraries take beside that is told by `memory`."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        torch.cuda.set_per_process_memory_fraction(fraction, self.torch_device)
        self._most = int(fraction * total)
        self._withheld = max(free + torch.cuda.memory_reserved(self.torch_device) - self._most, 0)
        return True

    def synchronize(self) -> None:
        """Wait for the current GPU."""
        torch.cuda.synchronize()

    def peak(self, run: Callable[[], None]) -> int:
        """What the allocator reserved, fragments and the libraries' workspaces with it."""
        return _peak(torch.cuda, self, run)

    def graph_pool(self) -> Any:
        """A memory pool of the caching allocator, which is gone with the last graph that used it."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], pool: Any = None) -> Callable[[], None] | None:
        """A CUDA graph (HIP graph on AMD) of `run`; it must have run once before, so that nothing is made in it.

        The graphs of one pool share memory: they are replayed one at a time, and what one gives is taken before the
        next. A `run` that waits for the GPU is an error before anything is captured, since a capture that breaks off
        leaves PyTorch's allocator in the middle of it.
        """
        stream = torch.cuda.current_stream()
        with _waits_are_errors():
            run()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                run()
        except BaseException:
            torch.cuda.set_stream(stream)
            raise
        return graph.replay


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    """Within, PyTorch raises where the host would wait for the GPU. Its warning of that mode helps nobody."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


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

    def peak(self, run: Callable[[], None]) -> int:
        """What the allocator reserved, fragments and the libraries' workspaces with it."""
        return _peak(torch.xpu, self, run)


def _unavailable_gpu(build: str | None, platform: str) -> str | None:
    if build is None:
        return f"this PyTorch ({torch.__version__}) is built without {platform}"
    return None if torch.cuda.is_available() else f"PyTorch sees no {platform} device: no card, or no driver for it"


BUILT_IN: tuple[type[Device], ...] = (CPU, CUDA, HIP, XPU)
