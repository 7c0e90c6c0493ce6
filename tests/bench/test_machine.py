"""What is told of the machine, its GPU, and the commit of a checkout."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo.bench import machine

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "core.hooksPath=/dev/null"]
    return subprocess.run(
        ["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


@needs_git
def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    git(tmp_path, "init", "--quiet")
    assert machine.commit(package) is None, "nothing is tracked"
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    hash = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "tag", "v1")
    assert machine.commit(package) == hash
    (package / "__init__.py").write_text("changed")
    assert machine.commit(package) == f"{hash}-dirty"


@needs_git
def test_an_installed_package_is_no_checkout(tmp_path: Path) -> None:
    """Its folder lies in somebody's repository that does not track it."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "first")
    (tmp_path / "__init__.py").touch()
    assert machine.commit(tmp_path) is None


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit() is None


def test_the_machine_is_described() -> None:
    found = machine.machine()
    assert found["cpu"]
    assert isinstance(found["cores"], int)
    assert isinstance(found["memory_gb"], float)
    assert found["memory_gb"] > 0
    assert machine.versions().keys() == {"python", "octavo", "torch", "transformers"}


def test_of_a_cpu_no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "get_device_module", asked)
    monkeypatch.setattr(machine, "_said", asked)
    assert machine.accelerator(torch.device("cpu")) == {}


@pytest.mark.parametrize("driver", ["570.1", None])
def test_a_gpu_is_described(driver: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without NVIDIA's program the driver is not known."""
    if driver is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho {driver}\n")
        program.chmod(0o755)
    properties = SimpleNamespace(name="A Card", total_memory=80_000_000_000)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    found = machine.accelerator(torch.device("cuda", 0))
    assert found.pop("triton") == machine._version("triton")
    assert found == {"gpu": "A Card", "gpu_memory_gb": 80.0, "driver": driver, "cuda": "12.8"}
    assert machine._version("no-such-distribution") is None
