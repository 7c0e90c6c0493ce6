"""The devices that come with octavo: what they say about a machine that has them, and about one that has not."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from octavo.attention import device as device_module
from octavo.attention.device import BUILT_IN, CPU, CUDA, HIP, XPU, Device, Memory


def build(monkeypatch: pytest.MonkeyPatch, *, cuda: str | None, hip: str | None, available: bool) -> None:
    """Pretend that PyTorch was built for this platform."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)


def test_names_and_order() -> None:
    assert {device.name for device in BUILT_IN} == {"cpu", "cuda", "rocm", "xpu"}
    assert min(BUILT_IN, key=lambda device: device.priority) is CPU
    assert len({device.name for device in BUILT_IN}) == len(BUILT_IN)


@pytest.mark.parametrize("device", BUILT_IN)
def test_unavailable_never_raises(device: type[Device]) -> None:
    reason = device.unavailable()
    assert reason is None or len(reason.split()) > 3


def test_the_cpu_is_always_there() -> None:
    cpu = CPU()
    assert CPU.unavailable() is None
    assert cpu.torch_device == torch.device("cpu")
    assert cpu.capture(lambda: None) is None
    cpu.synchronize()


@pytest.mark.parametrize("resettable", [True, False])
def test_the_peak_of_the_cpu_is_what_was_touched(
    resettable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory that was let go again counts, memory that was held before does not."""
    size = 2**27
    held = torch.ones(size // 4)
    if not resettable:
        (tmp_path / "clear_refs").mkdir()
        (tmp_path / "status").symlink_to("/proc/self/status")
        monkeypatch.setattr(device_module, "_PROCESS", tmp_path)

    def run() -> None:
        torch.ones(size // 4).sum()

    peak = CPU().peak(run)
    assert peak >= size - 2**22
    assert not resettable or peak < 1.5 * size
    assert held.sum() == size // 4


def test_without_proc_the_peak_is_what_the_most_has_grown_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_module, "_PROCESS", tmp_path / "nothing")
    kibibytes = iter([1000, 1700])
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=next(kibibytes)))
    monkeypatch.setattr(device_module, "resource", usage)
    assert CPU().peak(lambda: None) == 700 * 1024


@pytest.mark.parametrize(("left", "peak"), [(7000, 3500), (4000, 6000)])
def test_the_peak_of_a_gpu_is_what_its_allocator_or_the_driver_says(
    left: int, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator reserved 3500 more at most; the driver has that many bytes left of 10000."""
    free = [10_000]
    told: list[str] = []
    statistics = SimpleNamespace(
        empty_cache=lambda: told.append("empty"),
        reset_peak_memory_stats=lambda: told.append("reset"),
        memory_reserved=lambda device=None: 500,
        max_memory_reserved=lambda device=None: 4000,
        synchronize=lambda: told.append("wait"),
        current_device=lambda: 0,
        mem_get_info=lambda device: (free[0], 20_000),
    )
    monkeypatch.setattr(torch, "cuda", statistics)

    def run() -> None:
        told.append("run")
        free[0] = left

    assert CUDA().peak(run) == peak
    assert told == ["empty", "reset", "run", "wait", "empty"]


def test_the_peak_of_another_device_is_what_it_keeps() -> None:
    class Other(CPU):
        name = "other"
        peak = Device.peak
        frees: ClassVar[list[int]] = [900, 200]

        def memory(self) -> Memory:
            return Memory(self.frees.pop(0), 1000)

    assert Other().peak(lambda: None) == 700


def test_memory_of_the_cpu_is_in_bytes() -> None:
    memory = CPU().memory()
    assert 2**26 < memory.free < memory.total < 2**50


@pytest.mark.parametrize(
    ("cuda", "hip", "available", "cuda_reason", "hip_reason"),
    [
        (None, None, False, "built without CUDA", "built without ROCm"),
        ("12.8", None, False, "no CUDA device: no card, or no driver", "built without ROCm"),
        ("12.8", None, True, None, "built without ROCm"),
        (None, "6.4", False, "built for ROCm", "no ROCm device: no card, or no driver"),
        (None, "6.4", True, "built for ROCm", None),
    ],
)
def test_cuda_and_rocm_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    hip: str | None,
    available: bool,
    cuda_reason: str | None,
    hip_reason: str | None,
) -> None:
    build(monkeypatch, cuda=cuda, hip=hip, available=available)
    for device, expected in ((CUDA, cuda_reason), (HIP, hip_reason)):
        reason = device.unavailable()
        assert reason is None if expected is None else expected in (reason or "")


def test_a_gpu_is_the_process_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9) if device.index == 3 else (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    for device in (CUDA(), HIP()):
        assert device.torch_device == torch.device("cuda", 3)
        assert device.memory() == Memory(free=5, total=9)
        device.synchronize()
    assert waited == [True, True]


@pytest.mark.parametrize(
    ("fraction", "free", "reserved", "left"),
    [
        (1.0, 600, 0, 600),
        (0.5, 600, 0, 500),
        (0.5, 400, 150, 300),  # the allocator has 150, and 50 went to libraries
        (0.5, 900, 150, 350),  # another process has let go of what it had
        (0.1, 400, 150, 0),
    ],
)
def test_a_limited_gpu_tells_what_is_left_of_its_share(
    fraction: float, free: int, reserved: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1000 bytes, 600 of them free at the start and none of them ours."""
    told: list[tuple[float, torch.device]] = []
    now = {"free": 600, "reserved": 0}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (now["free"], 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: now["reserved"])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: told.append(given))
    gpu = CUDA()
    assert gpu.limit(fraction)
    now.update(free=free, reserved=reserved)
    assert gpu.memory() == Memory(left, 1000)
    assert told == [(fraction, torch.device("cuda", 2))]


def test_what_is_held_before_a_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 of 1000 bytes are ours when half of them becomes the limit."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: None)
    gpu = CUDA()
    gpu.limit(0.5)
    assert gpu.memory().free == 200


def test_other_devices_have_no_limit() -> None:
    cpu = CPU()
    total = cpu.memory().total
    assert not cpu.limit(0.1)
    assert cpu.memory().total == total


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to a GPU that is not there."""
    events: list[str] = []

    class Recording:
        def __init__(self, graph: object, pool: object) -> None:
            events.append(f"pool {pool}")

        def __enter__(self) -> None:
            events.append("begin")

        def __exit__(self, *_: object) -> None:
            events.append("end")

    def set_mode(mode: str) -> None:
        """As PyTorch does it the first time; to a test a warning is an error."""
        events.append(mode)
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: events.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: len(events))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: events.append(f"back to {stream}"))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return events


def test_capture_records_once_and_returns_the_replay(captures: list[str]) -> None:
    """Before that it runs once where to wait for the GPU is an error; all graphs are of one pool."""
    device = CUDA()
    replay = device.capture(lambda: captures.append("run"))
    assert replay is not None
    replay()
    replay()
    pool = captures[3]
    assert captures == ["error", "run", "default", pool, "begin", "run", "end", "replay", "replay"]
    assert device.capture(lambda: None) is not None
    assert captures.count(pool) == 2


def test_a_capture_that_breaks_off_leaves_no_stream_behind(captures: list[str]) -> None:
    def run() -> None:
        if "begin" in captures:
            raise RuntimeError("not while capturing")

    with pytest.raises(RuntimeError, match="not while capturing"):
        CUDA().capture(run)
    assert captures[-1] == "back to stream"


def test_an_intel_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert "PyTorch sees no Intel GPU" in (XPU.unavailable() or "")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert XPU.unavailable() is None
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda _: (7, 8))
    monkeypatch.setattr(torch.xpu, "synchronize", lambda: None)
    xpu = XPU()
    assert xpu.torch_device == torch.device("xpu", 1)
    assert xpu.memory() == Memory(7, 8)
    assert xpu.capture(lambda: None) is None
    xpu.synchronize()
