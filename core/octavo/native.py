"""C++ that ships as source: built once by the machine's own compiler, kept in octavo's cache folder, called by ctypes.

For backends too: give `load` a source file whose functions are `extern "C"`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from octavo.settings import cache_folder, named_compiler

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")


def compiler() -> str | None:
    """The path of a C++ compiler: `CXX`, or the first of the usual names; None without one."""
    return next(filter(None, map(shutil.which, filter(None, (named_compiler(), *COMPILERS)))), None)


def fault(source: Path) -> str | None:
    """Why `source` cannot be built here, in a sentence, or None. Builds it, the first time on a machine: seconds."""
    if compiler() is None:
        return f"no C++ compiler to build its kernel: set CXX, or install one of {', '.join(COMPILERS)}"
    try:
        load(source)
    except RuntimeError as error:
        return f"its kernel cannot be built here: {' '.join(str(error).split())[:300]}"
    return None


def load(source: Path) -> ctypes.CDLL:
    """What `source` is built to. Raises RuntimeError with the compiler's or the loader's words if it cannot be had."""
    outcome = _load(source)
    if isinstance(outcome, str):
        raise RuntimeError(outcome)
    return outcome


@cache
def _load(source: Path) -> ctypes.CDLL | str:
    """The library, or why there is none: asked for by every process, answered once in each."""
    path = compiler()
    if path is None:
        return f"no C++ compiler: neither CXX nor {', '.join(COMPILERS)} is on the PATH"
    library = cache_folder() / "kernels" / f"{source.stem}-{_stamp(source, path)}.so"
    refused = library.with_suffix(".failed")
    try:
        if refused.exists():
            return refused.read_text()
        if not library.exists() and (words := _build(source, path, library)):
            refused.write_text(words)
            return words
        if not _is_ours(library):
            return f"{library} belongs to somebody else, or others may write it: remove it, or set OCTAVO_CACHE"
        return ctypes.CDLL(str(library))
    except OSError as error:
        return f"{library}: {error}"


def _build(source: Path, path: str, library: Path) -> str | None:
    """Under a name of its own first, so that nobody loads half a file. Returns the compiler's words if it fails."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [path, *FLAGS, str(source), *_openmp(), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{path} says: {done.stderr.strip() or f'exit code {done.returncode}'}"
        built.chmod(0o700)
        built.replace(library)
    return None


def _is_ours(library: Path) -> bool:
    """What is loaded runs as this user: nobody else may have put it there."""
    status = library.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _openmp() -> list[str]:
    """PyTorch's own copy of the OpenMP library: with a second one, two pools of threads would fight for the cores."""
    home = Path(torch.__file__).parent
    return [
        str(found) for folder in (home / "lib", home.parent / "torch.libs") for found in folder.glob("libgomp*.so*")
    ][:1]


def _stamp(source: Path, path: str) -> str:
    """Changes with whatever the library depends on."""
    parts = (source.read_text(), *FLAGS, path, torch.__version__, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native looks at: a home folder may be shared by several machines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
