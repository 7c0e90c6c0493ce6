"""Intel's extension for PyTorch: one shared library, whose operators are all that is wanted of it.

Its Python package is never imported. That fails with AttributeError beside another PyTorch and with NameError beside
transformers 5, and where it succeeds it sets the class of all loggers, configures logging, and replaces functions of
transformers. The operators' schemas are those of 2.8, the last release for CPUs: they are private to it and their
arguments have no names, so no other is loaded.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

logger = logging.getLogger(__name__)

SERIES: Final = "2.8"
"""The one release of it, and of PyTorch, that is taken: a library for another PyTorch lacks symbols."""
_DISTRIBUTION: Final = "intel-extension-for-pytorch"
_PACKAGE: Final = "intel_extension_for_pytorch"
_FOR_GPUS: Final = "+xpu"
"""How versions end of what is built for Intel's GPUs: 2.8.10+xpu, beside PyTorch 2.8.0+xpu."""


@dataclass(frozen=True, slots=True)
class Build:
    """One of two libraries of the same name: what they have in common is not enough to call one for the other."""

    device: str
    """As `Device` calls it."""
    file: str
    """In the package's folder."""
    gpus: bool
    wanted: str
    """In words."""
    mend: str


CPU: Final = Build(
    device="cpu",
    file="lib/libintel-ext-pt-cpu.so",
    gpus=False,
    wanted=f"Intel's extension for PyTorch {SERIES} and PyTorch {SERIES}",
    mend="pip install 'octavo[ipex]' in an environment of its own",
)
XPU: Final = Build(
    device="xpu",
    file="lib/libintel-ext-pt-gpu.so",
    gpus=True,
    wanted=f"Intel's extension for PyTorch {SERIES} and PyTorch {SERIES}, both of them {_FOR_GPUS}",
    mend=f"torch==2.8.0{_FOR_GPUS} and {_DISTRIBUTION}==2.8.10{_FOR_GPUS}, which Intel's own index has",
)


def fault(build: Build) -> str | None:
    """Why it cannot be loaded, from versions and files alone, or None."""
    try:
        theirs = version(_DISTRIBUTION)
    except PackageNotFoundError:
        return f"Intel's extension for PyTorch is not installed: {build.mend}"
    found = (theirs, str(torch.__version__))
    if any(_series(one) != SERIES or one.endswith(_FOR_GPUS) != build.gpus for one in found):
        return f"it needs {build.wanted}, {' and '.join(found)} are installed: {build.mend}"
    if _file(build) is None:
        return f"{_DISTRIBUTION} {theirs} has no {build.file}: {build.mend}"
    return None


@cache
def operators(build: Build) -> Any:
    """Its operators. Raises RuntimeError with the loader's words where it cannot be loaded."""
    file = _file(build)
    if (reason := fault(build)) is not None or file is None:
        raise RuntimeError(reason)
    try:
        with _unheard():
            torch.ops.load_library(file)
    except OSError as error:
        raise RuntimeError(f"Intel's extension for PyTorch cannot be loaded: {error}; {build.mend}") from error
    return torch.ops.torch_ipex


def _file(build: Build) -> Path | None:
    """Where the library lies."""
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / build.file
    return file if file.is_file() else None


def _series(numbers: str) -> str:
    """Major and minor: "2.8" of "2.8.0+cpu"."""
    return ".".join(numbers.split("+")[0].split(".")[:2])


@contextmanager
def _unheard() -> Iterator[None]:
    """PyTorch warns on stderr that the library replaces kernels of its autocast, which octavo never enters."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            said.seek(0)
            if text := said.read().decode(errors="replace").strip():
                logger.debug("said while it was loaded: %s", text)
