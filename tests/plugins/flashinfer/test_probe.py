"""Why it cannot run, in a sentence each."""

import importlib.util
import shutil
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

import octavo_flashinfer.backend
import octavo_flashinfer.plugin
import octavo_reference.plugin
from octavo.attention.device import CPU, CUDA
from octavo.attention.select import choose
from octavo.attention.wish import BackendUnavailable
from octavo_flashinfer.backend import FlashInferBackend
from tests.distributions import plugins_of


class GPU(CUDA):
    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """What is installed on one, and its GPU."""

    def make(
        installed: tuple[str, ...] = ("flashinfer",),
        version: str = "0.6.14",
        capability: tuple[int, int] = (9, 0),
        nvcc: bool = True,
    ) -> None:
        def find(name: str) -> ModuleSpec | None:
            return ModuleSpec(name, None) if name in installed else None

        monkeypatch.setattr(octavo_flashinfer.backend, "find_spec", find)
        monkeypatch.setattr(octavo_flashinfer.backend, "version", lambda _: version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(shutil, "which", lambda _: None)
        (tmp_path / "bin").mkdir(exist_ok=True)
        if nvcc:
            (tmp_path / "bin/nvcc").touch()
        for name in ("CUDA_PATH", "FLASHINFER_NVCC"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))

    return make


def test_it_is_for_cuda() -> None:
    assert FlashInferBackend.probe(CPU()) == "it runs on cuda, not on cpu"


@pytest.mark.parametrize(
    ("has", "reason"),
    [
        ({}, None),
        ({"installed": ()}, "pip install 'octavo[flashinfer]'"),
        ({"version": "0.6.13"}, "it needs FlashInfer 0.6.14 or newer, 0.6.13 is installed"),
        ({"version": "0.5.14+cu130"}, "0.5.14+cu130 is installed"),
        ({"version": "0.6.14.post1"}, None),
        ({"version": "0.7.0rc1"}, None),
        ({"capability": (7, 5)}, "it needs compute capability 8.0 or newer, this GPU has 7.5"),
        ({"nvcc": False}, "nvcc, which is not found"),
    ],
)
def test_reasons(has: dict[str, object], reason: str | None, machine: Machine) -> None:
    machine(**has)
    found = FlashInferBackend.probe(GPU())
    assert (found is None) if reason is None else (reason in str(found))


def test_it_is_in_the_table_with_its_reason() -> None:
    plugins = plugins_of(octavo_flashinfer.plugin, octavo_reference.plugin)
    with pytest.raises(BackendUnavailable, match="cuda/flashinfer: it runs on cuda, not on cpu"):
        choose((), CPU(), attention="flashinfer", plugins=plugins)
    assert choose((), CPU(), plugins=plugins).name == "any/reference"


def test_offering_it_imports_nothing_heavy() -> None:
    assert importlib.util.find_spec("octavo_flashinfer.wrappers") is not None
    (offered,) = octavo_flashinfer.plugin.octavo_attention_backends()
    assert offered is FlashInferBackend
