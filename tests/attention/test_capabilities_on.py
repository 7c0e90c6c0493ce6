"""A made-up backend that can less on one of two chips: selection, the table, and the conformance suite know it."""

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import ClassVar

import pytest
import torch
from rich.console import Console

from octavo.attention.candidates import survey
from octavo.attention.contract import AttentionBackend, Capabilities, Feature
from octavo.attention.device import CPU, Device
from octavo.attention.phases import phased
from octavo.attention.report import Report as Backends
from octavo.attention.select import choose
from octavo.attention.wish import BackendUnavailable
from octavo.conformance import Suite
from octavo.conformance.registry import trials
from octavo.conformance.runner import play
from octavo.plugins import Plugins
from tests.conformance.faults import Narrow
from tests.distributions import Offers, backend, plugins_of, spec

FLOAT8 = torch.float8_e4m3fn


class Newer(CPU):
    name = "newer"


class Older(CPU):
    name = "older"


class Chips(Narrow):
    """Neither caches of float8, nor windows, nor captured steps on the older chip."""

    name, platform = "chips", "test"
    capabilities = replace(
        Narrow.capabilities,
        kv_dtypes=(torch.float32, FLOAT8),
        features=frozenset({"window", "sinks"}),
        graphs="decode",
    )
    built: ClassVar[list[str]] = []

    @classmethod
    def probe(cls, device: Device) -> str | None:
        return None if device.name in ("newer", "older") else "there is no chip"

    @classmethod
    def capabilities_on(cls, device: Device) -> Capabilities:
        if device.name == "newer":
            return cls.capabilities
        assert device.name == "older", "it is not asked about devices that its probe refuses"
        features: frozenset[Feature] = frozenset({"sinks"})
        return replace(cls.capabilities, kv_dtypes=(torch.float32,), features=features, graphs="none", chip="chip 1")


@pytest.fixture
def installed() -> Plugins:
    return plugins_of(Offers([Chips, backend("any", priority=-1, can={"kv_dtypes": (torch.float32, FLOAT8)})]))


ASKED = spec(head_size=16, kv_dtype=FLOAT8, window=3)
REASONS = (
    "cache dtype float8_e4m3fn is not supported on chip 1: it takes float32",
    "the model needs window 3: it supports sinks on chip 1",
)


def test_selection_has_the_reasons_before_anything_is_made(installed: Plugins) -> None:
    chosen = choose([ASKED], Newer(), attention="chips", plugins=installed)
    assert chosen.capabilities is Chips.capabilities
    with pytest.raises(BackendUnavailable) as caught:
        choose([ASKED], Older(), attention="chips", plugins=installed)
    assert "; ".join(f"test/chips: {reason}" for reason in REASONS) in str(caught.value)
    (found, _) = sorted(survey([ASKED], Older(), plugins=installed), key=lambda one: one.name, reverse=True)
    assert (found.name, found.reasons, found.block_size) == ("test/chips", REASONS, None)
    plain = choose([spec(head_size=16)], Older(), attention="chips", plugins=installed)
    assert plain.capabilities.graphs == "none"


def test_a_device_that_it_cannot_run_on_is_not_asked_about(installed: Plugins) -> None:
    (found,) = [one for one in survey([ASKED], CPU(), plugins=installed) if one.backend is Chips]
    assert found.reasons == ("there is no chip",)
    assert found.capabilities is Chips.capabilities


def test_what_raises_is_a_reason() -> None:
    def capabilities_on(device: Device) -> Capabilities:
        raise OSError("libchip.so: cannot open shared object")

    broken = backend("broken", capabilities_on=capabilities_on)
    (found,) = survey([], CPU(), plugins=plugins_of(Offers([broken])))
    assert found.reasons == ("it raises when asked: OSError: libchip.so: cannot open shared object",)


def test_two_phases_can_what_both_can_there(installed: Plugins) -> None:
    both = phased(Chips, Chips)
    assert both.capabilities_on(Newer()).kv_dtypes == (torch.float32, FLOAT8)
    assert both.capabilities_on(Older()).kv_dtypes == (torch.float32,)
    with pytest.raises(ValueError, match=f"prefill=test/chips: {REASONS[0]}"):
        both(spec(head_size=16, kv_dtype=FLOAT8), 16, Older())


def test_the_table_tells_of_the_chip_that_is_there(installed: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(device: Device) -> dict[str, object]:
        rows: Sequence[dict[str, object]] = Backends.of(device, None, None, installed).to_dict()["backends"]
        return next(one for one in rows if one["name"] == "test/chips")

    assert row(Newer())["cache_dtypes"] == ["float32", "float8_e4m3fn"]
    assert (row(Older())["cache_dtypes"], row(Older())["graphs"]) == (["float32"], "none")
    shown = StringIO()
    Console(file=shown, width=200).print(Backends.of(Older(), None, None, installed))
    (line,) = [line for line in shown.getvalue().splitlines() if "caches of" in line and "e4m3" not in line]
    assert "caches of float32 " in line


def test_the_suite_tries_what_is_declared_for_the_chip() -> None:
    tried = {device.name: trials(Chips, device) for device in (Newer(), Older(), CPU())}
    declared = Chips.capabilities
    for name, able in (("newer", declared), ("older", Chips.capabilities_on(Older())), ("cpu", declared)):
        configurations = [trial.configuration for trial in tried[name]]
        assert {one.kv_dtype for one in configurations} == set(able.kv_dtypes)
        assert {bool(one.window) for one in configurations} == {False, "window" in able.features}
        assert any(trial.case.name == "replay-decode" for trial in tried[name]) == (able.graphs != "none")


def test_the_report_says_what_was_not_tried_for_want_of_the_chip() -> None:
    report = play(Chips, Older())
    assert not report.failures
    assert report.to_dict()["not_declared_here"] == {
        "kv_dtypes": ["float8_e4m3fn"],
        "features": ["window"],
        "graphs": ["decode"],
    }
    text = StringIO()
    report.print(Console(file=text, width=160))
    lines = text.getvalue().splitlines()
    assert "not declared here: kv_dtypes float8_e4m3fn; features window; graphs decode" in lines
    cases = {line.split()[1]: line for line in lines if line.startswith("│")}
    absent = {case for case, line in cases.items() if "not declared here" in line}
    assert absent == {"fp8-scales", "replay-decode"}
    assert "not declared " in cases["replay-mixed"], "which it declares nowhere"


def test_where_everything_is_there_nothing_is_said() -> None:
    report = play(Chips, Newer(), only="fp8-scales")
    assert (report.lacking, report.to_dict()["not_declared_here"]) == ({}, {})


class TestOlder(Suite):
    """As the tests of a backend have it."""

    backend: ClassVar[type[AttentionBackend]] = Chips
    device = Older
    left_out = ("generation", "high-blocks", "pairs")
