"""Where a result was measured: the machine, the versions, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import octavo
from octavo.attention.device import CPU

Fact = str | int | float | None

_NAMED = ("torch", "transformers")
PLATFORMS = ("cuda", "hip", "xpu")
"""What PyTorch may be built for, by its own names."""


def machine() -> dict[str, Fact]:
    """The processor, its cores, the memory, and how busy it all is as a measurement starts."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(CPU().memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def accelerator(device: torch.device) -> dict[str, Fact]:
    """The GPU that a process uses, and what drives it and compiles for it. Nothing for a CPU: no driver is asked."""
    if device.type == "cpu":
        return {}
    properties = torch.get_device_module(device).get_device_properties(device)
    software = {name: getattr(torch.version, name, None) for name in PLATFORMS}
    return {
        "gpu": properties.name,
        "gpu_memory_gb": round(properties.total_memory / 1e9, 1),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        **{name: version for name, version in software.items() if version is not None},
        "triton": _version("triton"),
    }


def versions() -> dict[str, Fact]:
    """Of Python, octavo and what it computes with."""
    found = {name: importlib.metadata.version(name) for name in _NAMED}
    return {"python": platform.python_version(), "octavo": octavo.__version__, **found}


def commit(folder: Path = Path(octavo.__file__).parent) -> str | None:
    """The commit that a folder stands at, with "-dirty" behind it if files differ; None outside a checkout.

    A folder that git does not track is no checkout of it: octavo may be installed inside somebody's own repository.
    """
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    return _said("git", "-C", str(folder), *arguments)


def _said(*command: str) -> str | None:
    """What a program prints; None if there is no such program, or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """Of /proc/cpuinfo, where Linux names it: what `platform` says is empty there."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
