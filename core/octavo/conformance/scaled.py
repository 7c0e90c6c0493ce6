"""A stage whose keys and values are far too large for the cache: scales bring them into its range, as core does it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import Device
from octavo.conformance.configuration import Configuration
from octavo.conformance.stage import Draw, Stage
from octavo.kv.scales import KVScales

LARGEST = 448.0
"""Of e4m3, whose whole range checkpoints' scales use."""
SCALES = (10.0, 40.0)
"""The least and the largest: what is divided by them is in the thousands."""


class ScaledStage(Stage):
    """Histories hold keys and values as a model makes them; the backend and its cache see them divided."""

    def __init__(
        self, backend: type[AttentionBackend], configuration: Configuration, device: Device, seed: int
    ) -> None:
        super().__init__(backend, configuration, device, seed)
        least, most = SCALES
        shape = (self.spec.layers, 2, self.spec.kv_heads)
        drawn = least + (most - least) * torch.rand(shape, generator=self.generator)
        self.scales = [KVScales.of(key, value, self.spec) for key, value in drawn.to(self.device)]
        self.largest = min(LARGEST, torch.finfo(self.spec.kv_dtype).max)

    def _draw_keys(self, tokens: int, draw: Draw | None = None) -> Tensor:
        return self._enlarged(super()._draw_keys(tokens, draw or self._draw_whole_range), "key")

    def _draw_values(self, tokens: int) -> Tensor:
        return self._enlarged(super()._draw_keys(tokens, self._draw_whole_range), "value")

    def _draw_whole_range(self, *shape: int) -> Tensor:
        """What the cache's dtype holds, so that no answer is judged by how coarse that is: about 3 % of a number."""
        drawn = (2 * torch.rand(shape, generator=self.generator) - 1) * self.largest
        return drawn.to(self.spec.kv_dtype).to(drawn.dtype)

    def _enlarged(self, held: Tensor, part: str) -> Tensor:
        """Numbers of the cache [layers, tokens, kv_heads, head_size] -> what they stand for, as `dtype` holds it."""
        return (held * self._factors(part)).to(self.spec.dtype).double()

    def _factors(self, part: str) -> Tensor:
        """[layers, 1, heads or kv_heads, 1] on the CPU."""
        return torch.stack([getattr(scales, part).cpu() for scales in self.scales])[:, None]

    def _draw_query(self, *shape: int) -> Tensor:
        deviation_of_keys = self.largest / math.sqrt(3) * self._factors("query")
        return super()._draw_query(*shape) / deviation_of_keys

    def _asking(self, query: Tensor) -> Tensor:
        return torch.stack([scales.asking(part) for scales, part in zip(self.scales, query, strict=True)])

    def _cached(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [scales.cached(*parts) for scales, *parts in zip(self.scales, key, value, strict=True)]
        keys, values = zip(*pairs, strict=True)
        return torch.stack(keys), torch.stack(values)

    def _restored(self, layer: int, answer: Tensor) -> Tensor:
        return self.scales[layer].restored(answer)
