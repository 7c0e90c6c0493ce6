"""FlashAttention-3 beside octavo's backends: either build is found, and is given what it needs for each batch."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.attention.contract import AttentionSpec
from octavo.attention.device import CPU
from octavo.attention.installed import backends
from octavo.attention.wish import BackendUnavailable
from octavo.bench import kernels, peers
from octavo.bench.peers import FA3Backend
from octavo.bench.report import Report
from octavo.plugins import plugins
from tests.bench import flash_attention_3
from tests.bench.test_kernels import options

NAMES = ["1 x 1024", "8 x 512", "2 x 128", "1 x 128 with 4 decodes of 512"]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a CPU for a Hopper GPU."""
    monkeypatch.setattr(FA3Backend, "probe", classmethod(lambda cls, device: None))


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None) -> Iterator[None]:
    """Its own package is installed."""
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    text = f"from {flash_attention_3.__name__} import flash_attn_with_kvcache, get_scheduler_metadata\n"
    (tmp_path / "flash_attn_interface.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("flash_attn_interface", None)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither build is installed."""
    monkeypatch.setattr(peers, "_OFFICIAL", "no_such_module")
    monkeypatch.setattr(peers, "_VLLM_FILE", "no/such/file.so")


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None, missing: None) -> Iterator[None]:
    """vLLM's build is there; to import anything of vLLM would fail."""
    monkeypatch.setattr(peers, "_VLLM_FILE", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    file = tmp_path / peers._VLLM_FILE
    file.parent.mkdir(parents=True)
    file.touch()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    with flash_attention_3.operators():
        yield
    assert set(loaded) == {str(file)}


def measured(**changed: object) -> Report:
    plain = {"attention": ["fa3"], "head_size": 64, "dtypes": ["bfloat16"], "batches": NAMES, "block_sizes": [16]}
    return kernels.run(options(**(plain | changed)), lambda _: None)


@pytest.mark.parametrize("build", ["official", "vllm"])
def test_what_it_answers_is_right(build: str, quick: None, request: pytest.FixtureRequest) -> None:
    """Each batch is compared with float64, and what was wrong would have a fault in the place of its time."""
    request.getfixturevalue(build)
    report = measured(
        heads=["4/2", "2/2"], kv_dtypes=["bfloat16", "fp8_e4m3fn"], block_sizes=[16, 96], batches=NAMES[1:]
    )
    assert [row.get("fault") for row in report.rows] == [None] * 2 * 2 * 2 * 3
    assert {row["backend"] for row in report.rows} == {"peer/fa3"}
    assert all(isinstance(row["attend_seconds"], float) for row in report.rows)


def test_a_cache_that_it_does_not_take_is_left_out(official: None, quick: None) -> None:
    report = measured(kv_dtypes=["bfloat16", "float32"], attention=["any/reference", "fa3"], batches=NAMES[2:3])
    assert [(row["backend"], row["cache"]) for row in report.rows] == [
        ("any/reference", "bfloat16"), ("peer/fa3", "bfloat16"), ("any/reference", "float32"),
    ]  # fmt: skip
    assert "peer/fa3: cache dtype float32 is not supported" in str(report.workload["left out"])
    spec = AttentionSpec(
        layers=1, heads=2, kv_heads=2, head_size=64, scale=1.0, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"a cache of torch.float8_e4m3fn is not for queries of torch.float16"):
        FA3Backend.layout_type(spec, 16)


class Hopper(CPU):
    name = "cuda"


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((9, 0), "neither flash_attn_interface nor vllm/"), ((10, 0), "of compute capability 9.0, this one has 10.0")],
)
def test_what_is_missing_is_said(
    missing: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert reason in str(FA3Backend.probe(Hopper()))


def test_a_cpu_is_told_so(quick: None) -> None:
    with pytest.raises(BackendUnavailable, match=r"fa3 cannot be used here: peer/fa3: it runs on cuda, not on cpu"):
        measured()


def test_it_serves_nobody() -> None:
    """Only the benchmark knows it, and takes it only when it is asked for."""
    assert "peer/fa3" not in {one.kind.qualified_name() for one in backends(plugins())}
    assert FA3Backend.priority < 0
