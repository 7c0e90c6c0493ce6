"""The kernel, built once by the machine's own C++ compiler and kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_SOURCE = Path(__file__).with_name("kernel.cpp")


class Shape(ctypes.Structure):
    """What the kernel calls Shape."""

    _fields_ = (
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
    )


def compiler() -> str | None:
    """The path of a C++ compiler: `CXX`, or the first of the usual names; None without one."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS)))), None)


@cache
def load() -> ctypes.CDLL:
    """The built kernel. Raises RuntimeError with the compiler's words if it cannot be built."""
    path = compiler()
    if path is None:
        raise RuntimeError(f"no C++ compiler: neither CXX nor {', '.join(COMPILERS)} is on the PATH")
    library = _folder() / f"kernel-{_stamp(path)}.so"
    if not library.exists():
        _build(path, library)
    kernel = ctypes.CDLL(str(library))
    kernel.part_floats.restype = ctypes.c_int64
    return kernel


def _build(path: str, library: Path) -> None:
    """Under a name of its own first, so that nobody loads half a file."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [path, *FLAGS, str(_SOURCE), *_openmp(), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
        built.replace(library)


def _openmp() -> list[str]:
    """PyTorch's own copy of the OpenMP library: with a second one, two pools of threads would fight for the cores."""
    home = Path(torch.__file__).parent
    return [
        str(found) for folder in (home / "lib", home.parent / "torch.libs") for found in folder.glob("libgomp*.so*")
    ][:1]


def _stamp(path: str) -> str:
    """Changes with whatever the library depends on."""
    parts = (_SOURCE.read_text(), *FLAGS, path, torch.__version__, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native looks at: a home folder may be shared by several machines."""
    flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))]
    return flags[0] if flags else ""


def _folder() -> Path:
    """Beside the other things that octavo made and can make again."""
    general = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
    return Path(os.environ.get("OCTAVO_CACHE") or general).expanduser() / "kernels"
