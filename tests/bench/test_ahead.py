"""octavo kernels: what is compiled, in which shares, and what becomes of what does not compile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.attention.ahead import AheadOfTime, CompiledKernel, Expectation
from octavo.attention.contract import AttentionBackend, AttentionSpec
from octavo.bench.ahead import Options, Shard, run
from octavo.bench.batches import GRID
from octavo.bench.report import Report
from octavo.bench.roofline import run as calculated
from octavo.cli import app
from octavo.hooks import hookimpl
from octavo.plugins import Plugins
from tests.conformance.minimal import MinimalBackend
from tests.distributions import plugins_of


class Kernels(AheadOfTime):
    """A compiler that refuses one configuration."""

    product = "A Chip"
    bytes_per_second = 1e12

    def configurations(self, *, complete: bool) -> Sequence[str]:
        return ["plain", "large", "small", "odd"] if complete else ["plain", "large"]

    def compile(self, configuration: str, cache: Path) -> Sequence[CompiledKernel]:
        if configuration == "large":
            raise RuntimeError("out of resource: shared memory, Required: 9, Hardware limit: 8")
        return [
            CompiledKernel(
                kernel="decode", configuration=configuration, registers=90, shared_bytes=1024, scratch_bytes=0,
                programs=4, warps=2, code_bytes=512, compile_seconds=0.5, matrix_instructions=3, wide_loads=2,
                narrow_loads=0,
            )
        ]  # fmt: skip

    def expect(self, spec: AttentionSpec, block_size: int, contexts: Sequence[int], cache: Path) -> Expectation:
        return Expectation(read_bytes=sum(contexts), programs=1, programs_per_processor=1, turns=1, seconds=1e-6)


class Compilable(MinimalBackend):
    """For two targets."""

    name, platform = "good", "test"

    @classmethod
    def ahead(cls) -> Mapping[str, AheadOfTime]:
        return {"sm_90": Kernels(), "gfx942": Kernels()}


@pytest.fixture
def installed() -> Plugins:
    class Plugin:
        @hookimpl
        def octavo_attention_backends(self) -> Sequence[type[AttentionBackend]]:
            return [Compilable]

    return plugins_of(Plugin())


class Interrupted(Kernels):
    """Somebody presses Ctrl-C while it compiles the third."""

    def compile(self, configuration: str, cache: Path) -> Sequence[CompiledKernel]:
        if configuration == "small":
            raise KeyboardInterrupt
        return super().compile(configuration, cache)


def compiled(installed: Plugins, tmp_path: Path, **options: object) -> Report:
    return run(Options(**({"targets": (), "cache": tmp_path} | options)), lambda _: None, installed)  # type: ignore[arg-type]


def test_what_does_not_compile_is_a_fault_and_the_others_are_compiled(installed: Plugins, tmp_path: Path) -> None:
    rows = compiled(installed, tmp_path, targets=["hip:gfx942"]).rows
    assert [(row["target"], row["backend"], row["configuration"]) for row in rows] == [
        ("gfx942", "test/good", name) for name in ("plain", "large", "small", "odd")
    ]
    assert rows[1]["fault"] == "RuntimeError: out of resource: shared memory, Required: 9, Hardware limit: 8"
    assert all("fault" not in row and row["registers"] == 90 for row in rows if row["configuration"] != "large")


def test_shards_share_out_all_of_it(installed: Plugins, tmp_path: Path) -> None:
    everything = compiled(installed, tmp_path).rows
    assert len(everything) == 8
    parts = [compiled(installed, tmp_path, shard=Shard(number, 3)).rows for number in (1, 2, 3)]
    assert sorted(map(str, everything)) == sorted(str(row) for part in parts for row in part)
    assert {len(part) for part in parts} == {2, 3}


def test_a_share_without_any_is_told(installed: Plugins, tmp_path: Path) -> None:
    report = compiled(installed, tmp_path, targets=["gfx942"], shard=Shard(9, 9))
    assert report.rows == []
    assert "shard 9/9, which has none of 4 configurations" in report.caption()
    assert compiled(installed, tmp_path, targets=["gfx942"], shard=Shard(4, 9)).workload["shard"] == "4/9"


def test_what_was_compiled_before_an_interruption_is_given(
    installed: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not whole" not in compiled(installed, tmp_path).caption()
    monkeypatch.setattr(Compilable, "ahead", lambda: {"gfx942": Interrupted()})
    report = compiled(installed, tmp_path)
    assert [row["configuration"] for row in report.rows] == ["plain", "large"]
    assert "not whole interrupted after 2 of 4 configurations" in report.caption()


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_compiled(
    installed: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Compilable, "ahead", lambda: {"gfx942": Interrupted()})
    for folder in ("file", "file/kernels"):
        with pytest.raises(ValueError, match=f"cache .*{folder} cannot be written: .+. Name another folder"):
            compiled(installed, tmp_path / folder)
    assert compiled(installed, tmp_path / "new" / "kernels").rows


def test_a_part_can_be_asked_for(installed: Plugins, tmp_path: Path) -> None:
    assert len(compiled(installed, tmp_path, complete=False, targets=["cuda:90"]).rows) == 2
    (row,) = compiled(installed, tmp_path, configurations=["odd"], targets=["sm_90"], attention=["good"]).rows
    assert row["configuration"] == "odd"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["gfx9"]}, "no installed backend has kernels for gfx9: there are those for sm_90, gfx942"),
        ({"attention": ["bad"]}, "bad has no kernels for sm_90, gfx942: test/good have"),
        ({"attention": ["good", "bad"]}, "bad has no kernels for sm_90, gfx942: test/good have"),
        ({"configurations": ["none"]}, 'there is no configuration "none", of 4 such as plain, large, small: the table'),
        ({"configurations": ["smal"]}, 'there is no configuration "smal", of 4 such as small: the table without'),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    options: dict[str, object], message: str, installed: Plugins, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        compiled(installed, tmp_path, **options)


def test_a_compiler_that_is_not_there_is_told(
    installed: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ahead() -> Mapping[str, AheadOfTime]:
        raise ImportError("Triton is not installed: pip install triton")

    monkeypatch.setattr(Compilable, "ahead", ahead)
    told = r"there are those for none, and not for those of test/good: Triton is not installed: pip install triton"
    for targets in ([], ["gfx942"]):
        with pytest.raises(ValueError, match=told):
            compiled(installed, tmp_path, targets=targets)


@pytest.mark.parametrize("text", ["2", "0/2", "3/2", "1/2/3", "-1/2"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"shard is {text}, it must be a part and how many there are, such as 2/4"):
        Shard.read(text)


def test_a_roofline_is_said_to_be_calculated(installed: Plugins, tmp_path: Path) -> None:
    report = calculated(["gfx942"], [], tmp_path, lambda _: None, installed)
    assert [row["batch"] for row in report.rows] == [batch.name for batch in GRID if batch.kind == "decode"]
    assert "calculated nothing was run on these GPUs; memory as published A Chip at 1 TB/s" in report.caption()
    assert "calculated µs" in report.markdown()


def test_the_command(installed: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is told on stderr, and is exit status 1."""
    monkeypatch.setattr("octavo.plugins.plugins", lambda: installed)
    file = tmp_path / "kernels.json"
    words = ["kernels", "compile", "--target", "gfx942", "--cache", str(tmp_path), "--json", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "octavo: gfx942, test/good, large: RuntimeError: out of resource" in done.stderr
    assert len(json.loads(file.read_text())["rows"]) == 4
    assert CliRunner().invoke(app, [*words, "--configuration", "odd"]).exit_code == 0
    assert CliRunner().invoke(app, [*words, "--shard", "5/4"]).exit_code == 2
    empty = CliRunner().invoke(app, [*words, "--shard", "9/9"])
    assert (empty.exit_code, json.loads(file.read_text())["rows"]) == (0, [])
    assert "octavo: shard 9/9, which has none of 4 configurations" in empty.stderr
    monkeypatch.setattr(Compilable, "ahead", lambda: {"gfx942": Interrupted()})
    stopped = CliRunner().invoke(app, words)
    assert (stopped.exit_code, len(json.loads(file.read_text())["rows"])) == (130, 2)
    assert "octavo: this is not all of it: interrupted after 2 of 4 configurations" in stopped.stderr
    nowhere = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "none" / "kernels.json")])
    assert nowhere.exit_code == 2
    assert "there is no folder" in nowhere.stderr
