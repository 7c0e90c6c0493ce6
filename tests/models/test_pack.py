"""Packed and merged linear layers multiply as the plain ones do."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from octavo.models.pack import FewRows, MergedLinear, PackedLinear, pack

SIZES = st.sampled_from([1, 2, 3, 7, 16, 33, 64, 96, 130])


def linear(inputs: int, outputs: int, bias: bool = False, seed: int = 0, exact: bool = False) -> nn.Linear:
    """`exact`: its weights are bfloat16 numbers."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * inputs**-0.5)
        if exact:
            layer.weight.copy_(layer.weight.bfloat16())
    return layer


def rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(layer: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, layer.weight, dict(layer.named_parameters()).get("bias"))


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@settings(max_examples=60, deadline=None)
@given(
    inputs=SIZES,
    outputs=SIZES,
    bias=st.booleans(),
    exact=st.booleans(),
    shape=st.sampled_from(
        [(1,), (2,), (3,), (16,), (17,), (31,), (33,), (1, 1), (1, 5), (1, 40), (3, 7), (2, 1, 4), (1, 0), ()]
    ),
)
def test_a_packed_layer_multiplies_as_a_plain_one(
    inputs: int, outputs: int, bias: bool, exact: bool, shape: tuple[int, ...]
) -> None:
    layer = linear(inputs, outputs, bias, exact=exact)
    x = rows(*shape, inputs)
    found = PackedLinear(layer.weight, layer.bias)(x)
    assert found.shape == (*shape, outputs)
    close(found, plain(layer, x))


@torch.inference_mode()
@settings(max_examples=60, deadline=None)
@given(inputs=SIZES, outputs=SIZES, bias=st.booleans(), count=st.integers(1, 140), seed=st.integers(0, 99))
def test_few_rows_are_multiplied_by_float32_weights_that_are_bfloat16_numbers(
    inputs: int, outputs: int, bias: bool, count: int, seed: int
) -> None:
    """Against float64: as near as float32 sums come, which rounded weights or inputs would not be."""
    layer = linear(inputs, outputs, bias, seed, exact=True)
    few = FewRows.of(layer.weight.detach(), layer.bias.detach() if bias else None)
    assert few is not None
    x = rows(1, count, inputs, seed=seed + 1)
    expected = functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    torch.testing.assert_close(few(x).double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("place", [(0, 0), (40, 3), (69, 32)])
def test_one_weight_that_bfloat16_cannot_hold_keeps_the_layer_in_float32(place: tuple[int, int]) -> None:
    layer = linear(33, 70, exact=True)
    assert FewRows.of(layer.weight.detach(), None) is not None
    with torch.no_grad():
        layer.weight[place] = 1 + 2**-9
    assert FewRows.of(layer.weight.detach(), None) is None


def test_infinite_weights_and_zeros_of_either_sign_survive() -> None:
    layer = linear(2, 3, exact=True)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[torch.inf, 0.0], [-0.0, -torch.inf], [1.5, -2.0]]))
    few = FewRows.of(layer.weight.detach(), None)
    assert few is not None
    x = torch.tensor([[2.0, 3.0]])
    assert few(x).tolist() == functional.linear(x, layer.weight).tolist()


@torch.inference_mode()
def test_a_packed_layer_takes_a_view_and_more_rows_than_it_was_told() -> None:
    layer = linear(64, 96, bias=True)
    packed = PackedLinear(layer.weight, layer.bias)
    x = rows(3, 128, 700)
    for view in (x.transpose(1, 2)[..., :64], x.transpose(1, 2)[:, ::3, 64:], x[..., :1].transpose(1, 2)[..., 5:69]):
        close(packed(view), plain(layer, view))


@torch.inference_mode()
@settings(max_examples=40, deadline=None)
@given(
    inputs=SIZES,
    outputs=st.lists(SIZES, min_size=2, max_size=3),
    bias=st.booleans(),
    asked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=12),
    length=st.sampled_from([1, 3, 40]),
)
def test_merged_layers_give_each_part_in_any_order(
    inputs: int, outputs: Sequence[int], bias: bool, asked: Sequence[tuple[int, int]], length: int
) -> None:
    """Parts asked in any order, twice, or not at all, of inputs that take turns."""
    layers = [linear(inputs, size, bias, seed) for seed, size in enumerate(outputs)]
    merged = MergedLinear(layers)
    given = [rows(1, length, inputs, seed=seed) for seed in (5, 6)]
    for part, which in asked:
        index = part % len(layers)
        found = merged.part(index, given[which])
        assert found.shape == (1, length, outputs[index])
        close(found, plain(layers[index], given[which]))


@torch.inference_mode()
def test_an_input_that_comes_after_another_was_freed_is_not_taken_for_it() -> None:
    """A new tensor may get the memory, and the id, of one that is gone."""
    layers = [linear(8, 8, seed=seed) for seed in range(3)]
    merged = MergedLinear(layers)
    for seed in range(50):
        x = rows(1, 4, 8, seed=seed)
        close(merged.part(0, x), plain(layers[0], x))  # the last part, which would let go of it, is not asked for
        del x


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(16, size, bias, size) for size in (32, 8, 8))
        self.o_proj = linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        parts: list[Tensor] = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        out: Tensor = self.o_proj(parts[0] + torch.cat([parts[1], parts[2], parts[1], parts[2]], dim=-1))
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(16, 24, seed=1), linear(16, 24, seed=2), linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.up_proj(x) * functional.silu(self.gate_proj(x)))
        return out


class Model(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(bias), Gated(), Attention(bias)])
        self.head = linear(16, 50)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_model_computes_what_it_did(bias: bool) -> None:
    model = Model(bias)
    inputs = [rows(1, length, 16, seed=length) for length in (1, 5, 40)]
    expected = [model(x) for x in inputs]
    assert pack(model) == 2 * 4 + 3 + 1
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert not list(model.parameters()), "the plain weights are let go"
    for x, before in zip(inputs, expected, strict=True):
        close(model(x), before)
    assert pack(model) == 0, "once is enough"


class Quantized(nn.Linear):
    """Knows better how to multiply."""


def without(model: Any, change: str) -> Any:
    """The model with something about its first query projection that keeps it from being packed."""
    layer = model.layers[0]
    if change == "bfloat16":
        layer.q_proj.to(torch.bfloat16)
    elif change == "subclass":
        layer.q_proj = Quantized(16, 32, bias=False)
    elif change == "device":
        layer.q_proj = nn.Linear(16, 32, bias=False, device="meta")
    return model


@pytest.mark.parametrize("change", ["bfloat16", "subclass", "device"])
def test_what_is_no_plain_float32_layer_on_a_cpu_stays_as_it_is(change: str) -> None:
    model = without(Model(), change)
    query = model.layers[0].q_proj
    assert pack(model) == 2 * 4 + 3
    assert model.layers[0].q_proj is query
    assert isinstance(model.layers[0].k_proj, PackedLinear)


@torch.inference_mode()
@pytest.mark.parametrize("other", ["inputs", "bias"])
def test_projections_that_differ_in_kind_are_packed_one_by_one(other: str) -> None:
    model = Gated()
    model.up_proj = linear(12 if other == "inputs" else 16, 24, bias=other == "bias", seed=3)
    up = model.up_proj
    assert pack(model) == 3
    assert all(isinstance(module, PackedLinear) for module in (model.gate_proj, model.up_proj, model.down_proj))
    x = rows(1, 4, up.in_features)
    close(model.up_proj(x), plain(up, x))


@torch.inference_mode()
def test_projections_of_any_dtype_and_device_are_merged_where_nothing_is_packed() -> None:
    """As on a GPU, whose products stay the library's."""
    linears = [nn.Linear(16, size, bias=True, dtype=torch.bfloat16) for size in (32, 8, 8)]
    merged, x = MergedLinear(linears), torch.randn(5, 16, dtype=torch.bfloat16)
    assert type(merged.linear) is nn.Linear
    for index, linear in enumerate(linears):
        torch.testing.assert_close(merged.part(index, x), linear(x))
    elsewhere = Model().to("meta")
    assert pack(elsewhere) == 3 + 2 + 3
    assert type(elsewhere.head) is nn.Linear
