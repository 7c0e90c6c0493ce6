"""The ROCm backends without a card: what they say of machines, and whether their tables keep to what chips have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from octavo.attention.device import CPU, HIP
from octavo_rocm.backend import FlashDecodingBackend, PagedBackend, ROCmBackend
from octavo_triton.ahead import batch_of, cache_of, step, there
from octavo_triton.chips import chips
from octavo_triton.driver import compiling
from octavo_triton.reachable import Configuration, configurations
from octavo_triton.tuning import fitted, tunings
from tests.backends.compiled import apart, chip_of
from tests.distributions import spec

BACKENDS = (FlashDecodingBackend, PagedBackend)
ENTRIES = sorted(tunings(ROCmBackend.folder / "tuning.json"))


class Card(HIP):
    """A card that is not there."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")


def found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A driver that tells of a card."""
    properties = SimpleNamespace(gcnArchName=name, shared_memory_per_block=160 << 10, multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_it_runs_on_its_own_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FlashDecodingBackend.probe(CPU()) == "it runs on rocm, not on cpu"
    found(monkeypatch, "gfx942:sramecc+:xnack-")
    assert FlashDecodingBackend.probe(Card()) is None
    found(monkeypatch, "gfx1101")
    assert PagedBackend.probe(Card()) is None
    found(monkeypatch, "gfx906")
    assert PagedBackend.probe(Card()) == (
        "it knows gfx1100, gfx1201, gfx90a, gfx942, gfx950 and chips like them, this GPU is gfx906"
    )


def test_tiles_and_processors_are_those_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    held = tunings(ROCmBackend.folder / "tuning.json")
    for name, architecture in (("gfx950:xnack-", "gfx950"), ("gfx1200", "gfx1201")):
        found(monkeypatch, name)
        backend = PagedBackend(
            spec(head_size=128, kv_heads=8, heads=32, dtype=torch.bfloat16, kv_dtype=torch.bfloat16), 16, Card()
        )
        assert backend.tuning == held[architecture, "paged"]
        assert backend.processors == 7


@pytest.mark.parametrize(("architecture", "name"), ENTRIES, ids=map("-".join, ENTRIES))
def test_tiles_fit_into_the_lds(architecture: str, name: str) -> None:
    """As they are in the table, for heads of 128 elements of two bytes: none is cut down."""
    tuning = tunings(ROCmBackend.folder / "tuning.json")[architecture, name]
    room = chips(ROCmBackend.folder / "chips.json")[architecture].shared_bytes * 3 // 4
    assert fitted(tuning, 128, 2, 4, room, ROCmBackend.waiting) == tuning


def test_every_chip_has_tiles_for_both_layouts() -> None:
    known = chips(ROCmBackend.folder / "chips.json")
    assert set(ENTRIES) == {(architecture, backend.name) for architecture in known for backend in BACKENDS}


def test_a_wrong_entry_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = json.loads((ROCmBackend.folder / "tuning.json").read_text())
    table["gfx942"]["paged"]["decode"] |= {"keys": 128, "stages": 3}
    (tmp_path / "tuning.json").write_text(json.dumps(table))
    (tmp_path / "chips.json").write_text((ROCmBackend.folder / "chips.json").read_text())
    monkeypatch.setattr(ROCmBackend, "folder", tmp_path)
    with pytest.raises(AssertionError):
        test_tiles_fit_into_the_lds("gfx942", "paged")
    test_tiles_fit_into_the_lds("gfx942", "flashdecoding")


def launch_too_large(cache: Path) -> None:
    """Tiles that a user asks for are not cut down."""
    chip = chip_of(PagedBackend, "gfx942")
    asked = Configuration(spec(head_size=128, dtype=torch.bfloat16, kv_dtype=torch.bfloat16), 16)
    backend = there(PagedBackend, asked, chip)
    backend.tuning = backend.tuning.with_options({"decode": {"keys": 128, "stages": 3}})
    with compiling(chip, cache, lambda build: None):
        step(backend, batch_of([1]), cache_of(backend, small=True))


def test_what_takes_too_much_of_the_lds_is_refused_before_anybody_has_the_card(tmp_path: Path) -> None:
    """As a card's driver refuses it: by the check that Triton makes at a launch."""
    limit = chip_of(PagedBackend, "gfx942").shared_bytes
    with pytest.raises(Exception, match=f"shared memory, Required: [0-9]+, Hardware limit: {limit}"):
        apart(launch_too_large, tmp_path)


def test_caches_that_triton_cannot_convert_are_not_for_that_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    fnuz = {torch.float8_e4m3fnuz}
    declared = PagedBackend.capabilities
    found(monkeypatch, "gfx942:sramecc+:xnack-")
    assert PagedBackend.capabilities_on(Card()) == declared
    for name, chip in (("gfx90a", "gfx90a"), ("gfx950", "gfx950"), ("gfx1102", "gfx1100"), ("gfx1200", "gfx1201")):
        found(monkeypatch, name)
        able = PagedBackend.capabilities_on(Card())
        assert set(declared.kv_dtypes) - set(able.kv_dtypes) == fnuz
        assert able == replace(declared, kv_dtypes=able.kv_dtypes, chip=chip)


@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_not_compiled_for_it(backend: type[ROCmBackend]) -> None:
    for chip in chips(ROCmBackend.folder / "chips.json"):
        names = [str(one) for one in configurations(backend, chip, complete=True)]
        assert any("cache float8_e5m2 " in f"{name} " for name in names)
        assert any("fnuz" in name for name in names) == (chip == "gfx942")


def test_where_triton_interprets_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", True)  # what is interpreted before this leaves the variable unread
    with pytest.raises(ImportError, match="TRITON_INTERPRET is set, with which Triton compiles nothing: unset it"):
        PagedBackend.ahead()
