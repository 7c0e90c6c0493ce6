"""Why it cannot run, in a sentence each, on CPUs and on Intel's GPUs; what it says of itself; what loading leaves."""

import io
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from rich.console import Console

import octavo_ipex.plugin
import octavo_reference.plugin
from octavo.attention.device import CPU, CUDA, XPU, Device
from octavo.attention.report import Report
from octavo.attention.select import choose
from octavo.attention.wish import BackendUnavailable
from octavo_ipex import library, xpu
from octavo_ipex.backend import FlashDecodingBackend, PagedBackend
from octavo_ipex.base import IPEXBackend
from tests.backends.ipex.steps import Card
from tests.distributions import plugins_of

PLUGINS = (octavo_reference.plugin, octavo_ipex.plugin)
MEND = "pip install 'octavo[ipex]' in an environment of its own"
BUILDS = [(FlashDecodingBackend, CPU), (PagedBackend, CPU), (xpu.FlashDecodingBackend, XPU), (xpu.PagedBackend, XPU)]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """2.8.0 beside PyTorch 2.8.0, with its files, which are none: importing the package or loading a file fails."""
    package = tmp_path / "intel_extension_for_pytorch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AttributeError(\"module 'os' has no attribute 'exit'\")")
    for build in (library.CPU, library.XPU):
        (package / build.file).write_text("no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "intel_extension_for_pytorch", raising=False)
    monkeypatch.setattr(library, "version", lambda _: "2.8.0")
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    library.operators.cache_clear()
    return package


@pytest.mark.parametrize(("kind", "device"), BUILDS)
def test_each_is_for_one_kind_of_device(kind: type[IPEXBackend], device: type[Device], on_stand_in: None) -> None:
    for other in (CPU(), XPU(), CUDA()):
        wrong = None if isinstance(other, device) else f"it runs on {device.name}, not on {other.name}"
        assert kind.probe(other) == wrong


@pytest.mark.parametrize(("kind", "device"), BUILDS)
def test_it_is_not_installed(kind: type[IPEXBackend], device: type[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(library, "version", missing)
    assert kind.probe(device()) == f"Intel's extension for PyTorch is not installed: {kind.build.mend}"


def test_how_it_is_installed_is_told() -> None:
    assert library.CPU.mend == MEND
    assert "torch==2.8.0+xpu and intel-extension-for-pytorch==2.8.10+xpu" in library.XPU.mend


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ("2.8.0", "2.8.0+cu128", CPU), ("2.8.0+cpu", "2.8.1", CPU), ("2.8.0", "2.13.0+cpu", None),
        ("2.7.0", "2.8.0", None), ("2.80.0", "2.80.0", None), ("2.8.10+xpu", "2.8.0+xpu", XPU),
        ("2.8.10+xpu", "2.8.0", None), ("2.8.10+xpu", "2.8.0+cu128", None), ("2.8.0", "2.8.0+xpu", None),
        ("2.7.10+xpu", "2.7.0+xpu", None), ("2.8.10+xpu", "2.9.0+xpu", None), ("2.10.10+xpu", "2.10.0+xpu", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "device"), BUILDS)
def test_versions_must_fit(
    kind: type[IPEXBackend], device: type[Device], theirs: str, ours: str, fits: type[Device] | None,
    installed: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(library, "version", lambda _: theirs)
    monkeypatch.setattr(torch, "__version__", ours)
    reason, both = kind.probe(device()), ", both of them +xpu" if device is XPU else ""
    told = f"for PyTorch 2.8 and PyTorch 2.8{both}, {theirs} and {ours} are installed: {kind.build.mend}"
    assert reason is None if fits is device else str(reason).endswith(told)


@pytest.mark.parametrize(("kind", "device"), BUILDS)
def test_a_build_without_the_file_is_told(
    kind: type[IPEXBackend], device: type[Device], installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device is XPU:
        monkeypatch.setattr(library, "version", lambda _: "2.8.10+xpu")
        monkeypatch.setattr(torch, "__version__", "2.8.0+xpu")
    assert kind.probe(device()) is None
    (installed / kind.build.file).unlink()
    assert f"has no {kind.build.file}" in str(kind.probe(device()))
    with pytest.raises(RuntimeError, match=f"has no {kind.build.file}"):
        library.operators(kind.build)


def test_its_error_is_not_let_out(installed: Path) -> None:
    """Its Python package, which raises what it likes, is not imported; the loader's words are in octavo's error."""
    with pytest.raises(RuntimeError, match=r"cannot be loaded: .*libintel-ext-pt-cpu.so.*pip install"):
        library.operators(library.CPU)
    assert "intel_extension_for_pytorch" not in sys.modules


def test_it_is_never_chosen_but_by_name(on_stand_in: None) -> None:
    plugins = plugins_of(*PLUGINS)
    assert choose((), CPU(), plugins=plugins).name == "any/reference"
    assert choose((), CPU(), attention="paged", plugins=plugins).name == "ipex/paged"
    chosen = choose((), CPU(), attention="flashdecoding-ipex", plugins=plugins)
    assert (chosen.name, chosen.block_size) == ("ipex/flashdecoding-ipex", 64)
    with pytest.raises(BackendUnavailable, match="unless it is asked for by name"):
        choose((), CPU(), plugins=plugins_of(octavo_ipex.plugin))


def test_one_is_told_once_that_it_is_archived(on_stand_in: None) -> None:
    plugins, caution = plugins_of(*PLUGINS), "known security issues"
    selection = choose((), CPU(), attention="ipex/paged", plugins=plugins)
    assert selection.summary().count(caution) == 1
    pair = choose((), CPU(), attention="prefill=flashdecoding-ipex,decode=ipex/paged", plugins=plugins)
    assert pair.summary().count(caution) == 1
    assert caution not in choose((), CPU(), plugins=plugins).summary()
    rows = Report.of(CPU(), None, None, plugins).to_dict()["backends"]
    assert sum(caution in str(row["caution"]) for row in rows) == 4


def test_what_was_never_run_says_so(on_stand_in: None) -> None:
    plugins = plugins_of(*PLUGINS)
    rows = Report.of(CPU(), None, None, plugins).to_dict()["backends"]
    unproven = {row["name"] for row in rows if "octavo has never run it on a GPU" in str(row["caution"])}
    assert unproven == {"xpu/flashdecoding-ipex", "xpu/paged"}
    assert all(row["reasons"] == ["it runs on xpu, not on cpu"] for row in rows if row["name"] in unproven)
    assert "never run it" in choose((), Card(), attention="paged", plugins=plugins).summary()


def test_the_same_names_are_others_on_a_gpu(on_stand_in: None) -> None:
    """And there too nobody gets them unasked."""
    plugins = plugins_of(*PLUGINS)
    assert choose((), Card(), plugins=plugins).name == "any/reference"
    assert choose((), Card(), attention="paged", plugins=plugins).name == "xpu/paged"
    chosen = choose((), Card(), attention="flashdecoding-ipex", plugins=plugins)
    assert (chosen.name, chosen.block_size) == ("xpu/flashdecoding-ipex", 64)
    with pytest.raises(BackendUnavailable, match="it runs on cpu, not on xpu"):
        choose((), Card(), attention="ipex/paged", plugins=plugins)


@pytest.mark.parametrize(("attention", "times"), [(None, 4), ("ipex/paged", 4), ("reference", 4)])
def test_the_table_says_so_for_each(attention: str | None, times: int, on_stand_in: None) -> None:
    console = Console(width=400, file=io.StringIO(), record=True)
    console.print(Report.of(CPU(), attention, None, plugins_of(*PLUGINS)))
    assert " ".join(console.export_text().split()).count("known security issues") == times


def test_what_it_says_while_it_is_loaded_is_kept_for_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=library.logger.name), library._unheard():
        os.write(2, b"a warning of C++\n")
    assert "a warning of C++" in caplog.text
