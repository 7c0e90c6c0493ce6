"""Why it cannot run, in a sentence each; what it says of itself; what loading it leaves behind."""

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
from octavo.attention.device import CPU, XPU
from octavo.attention.report import Report
from octavo.attention.select import choose
from octavo.attention.wish import BackendUnavailable
from octavo_ipex import library
from octavo_ipex.backend import FlashDecodingBackend, PagedBackend
from tests.distributions import plugins_of

PLUGINS = (octavo_reference.plugin, octavo_ipex.plugin)
MEND = "pip install 'octavo[ipex]' in an environment of its own"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """2.8.0 beside PyTorch 2.8.0, with its file, which is none: importing the package or loading the file fails."""
    package = tmp_path / "intel_extension_for_pytorch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AttributeError(\"module 'os' has no attribute 'exit'\")")
    file = package / "lib/libintel-ext-pt-cpu.so"
    file.write_text("no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "intel_extension_for_pytorch", raising=False)
    monkeypatch.setattr(library, "version", lambda _: "2.8.0")
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    library.operators.cache_clear()
    return file


def test_it_is_for_cpus() -> None:
    assert FlashDecodingBackend.probe(XPU()) == "it runs on cpu, not on xpu"


def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(library, "version", missing)
    assert PagedBackend.probe(CPU()) == f"Intel's extension for PyTorch is not installed: {MEND}"


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ("2.8.0", "2.8.0+cu128", True), ("2.8.0+cpu", "2.8.1", True), ("2.8.0", "2.13.0+cpu", False),
        ("2.7.0", "2.8.0", False), ("2.80.0", "2.80.0", False),
    ],
)  # fmt: skip
def test_versions_must_fit(
    theirs: str, ours: str, fits: bool, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "version", lambda _: theirs)
    monkeypatch.setattr(torch, "__version__", ours)
    told = f"for PyTorch 2.8 and PyTorch 2.8, {theirs} and {ours} are installed: {MEND}"
    reason = PagedBackend.probe(CPU())
    assert reason is None if fits else str(reason).endswith(told)


def test_a_build_without_the_file_is_told(installed: Path) -> None:
    installed.unlink()
    assert "has no lib/libintel-ext-pt-cpu.so" in str(PagedBackend.probe(CPU()))


def test_its_error_is_not_let_out(installed: Path) -> None:
    """Its Python package, which raises what it likes, is not imported; the loader's words are in octavo's error."""
    with pytest.raises(RuntimeError, match=r"cannot be loaded: .*libintel-ext-pt-cpu.so.*pip install"):
        library.operators()
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
    assert (
        sum(caution in str(row["caution"]) for row in Report.of(CPU(), None, None, plugins).to_dict()["backends"]) == 2
    )


@pytest.mark.parametrize(("attention", "times"), [(None, 2), ("ipex/paged", 2), ("reference", 2)])
def test_the_table_says_so_for_each(attention: str | None, times: int, on_stand_in: None) -> None:
    console = Console(width=400, file=io.StringIO(), record=True)
    console.print(Report.of(CPU(), attention, None, plugins_of(*PLUGINS)))
    assert " ".join(console.export_text().split()).count("known security issues") == times


def test_what_it_says_while_it_is_loaded_is_kept_for_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=library.logger.name), library._unheard():
        os.write(2, b"a warning of C++\n")
    assert "a warning of C++" in caplog.text
