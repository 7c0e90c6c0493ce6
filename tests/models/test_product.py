"""A GPU's product of a few rows, interpreted on the CPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention.ahead import CompiledKernel
from octavo.models import compile, pack, product, product_kernels
from octavo.models.capture import Piece, capture, eager
from octavo.models.compile import compiled
from octavo_cuda.backend import FlashDecodingBackend
from octavo_triton.driver import Build, compiling
from octavo_triton.resources import resources
from tests.backends.compiled import apart, chip_of, fits
from tests.backends.triton.interpreter import interpreted
from tests.models.test_compile import SHAPES, bound, inputs

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture
def _interpreted() -> Iterator[None]:
    with interpreted():
        yield


def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None, held: product.Scratch) -> Tensor:
    """By the kernels, into memory that was something else before."""
    out = torch.full((len(x), len(weight)), float("nan"), dtype=x.dtype)
    held.partial.fill_(float("nan"))
    product.run(out, x, weight, bias, held)
    assert not held.arrived.any()
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "processors"),
    [
        (1, 512, 8, 8), (3, 512, 1, 8), (1, 1100, 21, 8), (2, 128, 64, 8), (3, 320, 100, 8), (16, 2048, 70, 132),
        (17, 1100, 64, 8), (32, 4096, 64, 132),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("_interpreted")
def test_a_few_rows_against_float64(dtype: torch.dtype, rows: int, depth: int, columns: int, processors: int) -> None:
    """Widths that no tile divides, sums in one part and in several, again with what the first run left behind."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 2 * depth, generator=generator).to(dtype)[:, :depth]  # rows lie apart
    weight = (torch.randn(columns, depth, generator=generator) * depth**-0.5).to(dtype)
    held = product.Scratch.of(processors, torch.device("cpu"))
    expected = functional.linear(x.double(), weight.double())
    for bias in (None, torch.randn(columns, generator=generator).to(dtype)):
        wanted = expected if bias is None else expected + bias.double()
        error = (multiplied(x, weight, bias, held).double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert error.max() < TOLERANCE[dtype] / 2  # one rounding of a single output


@pytest.mark.usefixtures("_interpreted")
def test_sums_are_cut_only_as_far_as_all_parts_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return lambda *given, **named: None

    monkeypatch.setattr(product_kernels, "few_rows", Launched())
    held = product.Scratch.of(132, torch.device("cpu"))
    for columns, depth in ((1024, 3072), (4096, 4096), (4096, 12288), (24576, 4096), (151936, 1024)):
        weight = torch.empty(columns, depth, dtype=torch.bfloat16, device="meta")
        product.run(torch.empty(0), torch.empty(8, depth, device="meta"), weight, None, held)
    assert [parts for _, parts in grids] == [6, 1, 2, 1, 1]
    assert all(parts == 1 or tiles * parts <= 132 for tiles, parts in grids)


def compile_all(target: str, cache: Path) -> list[CompiledKernel]:
    """Of one row and of as many as there may be, in one part and in several."""
    chip = chip_of(FlashDecodingBackend, target)
    builds: list[Build] = []
    held = product.Scratch.of(132, torch.device("cpu"))
    with compiling(chip, cache, builds.append):
        for rows, outputs, depth in ((1, 64, 4096), (16, 1024, 4096), (32, 64 * 132, 4096), (32, 1, 4000)):
            bias = None if outputs > 1 else torch.empty(outputs, dtype=torch.bfloat16)
            weight, x = (torch.empty(count, depth, dtype=torch.bfloat16) for count in (outputs, rows))
            product.run(torch.empty(rows, outputs, dtype=torch.bfloat16), x, weight, bias, held)
    return [resources(build, "product", chip) for build in builds]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile_and_fit(target: str, tmp_path: Path) -> None:
    found = apart(compile_all, target, tmp_path)
    assert {one.kernel for one in found} == {"product_kernels.one_row", "product_kernels.few_rows"}
    for one in found:
        fits(one, chip_of(FlashDecodingBackend, target))
        assert one.scratch_bytes == 0, one
        assert one.matrix_instructions or one.kernel == "product_kernels.one_row", one


def _plain_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


@torch.inference_mode()
def test_a_model_of_such_layers_computes_the_same_and_is_compiled_as_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases, merged projections, and a last layer that shares its weight with the embedding."""
    monkeypatch.setattr(product, "product", _plain_product)
    monkeypatch.setattr(pack, "_packable", lambda linear: False)
    monkeypatch.setattr(pack, "_has_product", lambda linear: type(linear) is torch.nn.Linear)
    monkeypatch.setattr(pack, "_mergeable", lambda linear: type(linear) is torch.nn.Linear)
    monkeypatch.setattr(compile, "_inductor", lambda piece, *_: compile._as_recorded(piece))
    monkeypatch.setattr(compile, "_on_gpu", lambda model: True)
    plain, fast = eager(bound("qwen2", tmp_path, packed=False)), bound("qwen2", tmp_path)
    assert sum(isinstance(module, pack.GPULinear) for module in fast.modules()) > 2
    captured = compiled(fast)
    for tokens, rows in SHAPES:
        expected, found = plain(*inputs(tokens, rows)), captured(*inputs(tokens, rows))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pieces = {step.signature() for step in capture(fast).steps if isinstance(step, Piece)}
    assert len(pieces) == 3
