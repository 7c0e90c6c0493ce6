"""Fills an environment with PyTorch 2.8, Intel's extension for it and what octavo's tests need: `make ipex`.

    python tests/backends/ipex/environment.py    # by the environment's own Python

PyTorch comes from the index as a build for CUDA, whose libraries are 2.5 GB that a CPU never calls. They are left out;
libraries with the names that PyTorch is linked to, and functions that say there is no device, stand in their place. It
needs gcc and nm. For tests only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]
BARE = ("torch==2.8.0", "intel-extension-for-pytorch==2.8.0", "accelerate>=1.1")
"""Without what they require: PyTorch's libraries for CUDA, which accelerate would bring by requiring PyTorch."""
TESTS = ("pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.8", "hypothesis>=6.100", "hatchling>=1.26")
VERSIONED = (
    "libcudart.so.12", "libcupti.so.12", "libcudnn.so.9", "libcublas.so.12", "libcublasLt.so.12", "libcufft.so.11",
    "libcusparse.so.12",
)  # fmt: skip
"""Whose symbols have a version, which is the library's name."""
PREFIXED = {
    "libnccl.so.2": "nccl",
    "libcufile.so.0": "cuFile",
    "libcurand.so.10": "curand",
    "libcusparseLt.so.0": "cusparseLt",
}
"""And those that only their names give away."""
LINKED = ("libtorch_cpu.so", "libtorch_python.so", "libc10_cuda.so", "libtorch_cuda.so", "libcaffe2_nvrtc.so")
WORDS = re.compile(r"(GetErrorString|GetErrorName|GetStatusString|ncclGetLastError)$")
"""Functions that return text."""


def main() -> None:
    """Each step does nothing that has been done."""
    pip("--no-deps", *BARE)
    pip(*wanted(), *TESTS)
    pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    make_libraries(Path(spec.origin).parent / "lib")


def pip(*arguments: str) -> None:
    """Without a cache, which would keep a gigabyte."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-input", *arguments]
    subprocess.run(command, check=True)


def wanted() -> Iterator[str]:
    """What octavo, PyTorch and accelerate require, but for PyTorch itself and what is for GPUs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in (*project["dependencies"], *(requires("torch") or ()), *(requires("accelerate") or ())):
        requirement, _, marker = line.partition(";")
        name = re.split(r"[^\w-]", requirement, maxsplit=1)[0]
        if name not in ("torch", "accelerate", "triton") and not name.startswith("nvidia-") and "extra" not in marker:
            yield line


def make_libraries(folder: Path) -> None:
    """Those that PyTorch's own in this folder are linked to."""
    with tempfile.TemporaryDirectory() as scratch:
        for library, names in undefined(folder / name for name in LINKED).items():
            source, versions = Path(scratch, "functions.c"), Path(scratch, "versions")
            source.write_text("".join(map(function, sorted(names))) or "int nothing;\n")
            versions.write_text(f"{library} {{ global: *; }};\n")
            versioned = [f"-Wl,--version-script={versions}"] if library in VERSIONED else []
            command = ["gcc", "-w", "-O1", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{library}", *versioned]
            subprocess.run([*command, "-o", folder / library, source], check=True)


def function(name: str) -> str:
    """100 is CUDA's word for no device."""
    if WORDS.search(name):
        return f'const char *{name}(void) {{ return "there is no CUDA here"; }}\n'
    return f"int {name}(void) {{ return 100; }}\n"


def undefined(files: Iterable[Path]) -> dict[str, set[str]]:
    """The symbols that these files want of each library."""
    found: dict[str, set[str]] = {library: set() for library in (*VERSIONED, *PREFIXED)}
    for file in files:
        command = ["nm", "--dynamic", "--undefined-only", str(file)]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version in found:
                found[version].add(name)
            for library, prefix in PREFIXED.items():
                if not version and name.startswith(prefix):
                    found[library].add(name)
    return found


if __name__ == "__main__":
    main()
