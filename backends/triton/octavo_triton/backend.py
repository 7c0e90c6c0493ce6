"""Paged attention by the kernels of this package, for any device that Triton compiles for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend, AttentionBatch, AttentionSpec
from octavo.attention.device import Device
from octavo.kv.layout import KVCache
from octavo_triton.layout import TritonLayout
from octavo_triton.plan import FIELDS, Decodes, Plan, Scratch, Storage
from octavo_triton.tuning import TUNABLES, RegisterTiles, Tuning, in_registers

_TURNS = 6
"""How often as many items as run at a time there may be."""
_TRITON = (3, 6)
"""The oldest that the kernels were compiled with."""


class TritonBackend(AttentionBackend):
    """Decoding splits contexts by tokens over the device's processors; prompts run tile by tile."""

    layout: TritonLayout
    tunables = TUNABLES

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Nothing is compiled before the first step. Options: `decode` and `prefill`, with other shapes of tiles."""
        shapes = {name: value for name, value in (options or {}).items() if name in self.tunables}
        others = {name: value for name, value in (options or {}).items() if name not in shapes}
        super().__init__(spec, block_size, device, others, sinks)
        from octavo_triton import launch

        self._launch = launch
        self._attention = launch.Attention(spec, self.layout, sinks)
        self.tuning = self.tune().with_options(shapes)
        groups = None if "prefill" in shapes else launch.warp_groups(spec, self.layout, device.torch_device)
        if groups is not None:
            self.tuning = replace(self.tuning, prefill=groups)
        self._prefill = self._attention.prefill if groups is None else self._attention.prefill_by_warp_groups
        self._tiles = self._register_tiles(shapes.get("decode"))
        held = self._tiles is not None
        self._decode = self._attention.decode_from_registers if held else self._attention.decode
        self.processors = self.count_processors()
        self._held: dict[int, Plan] = {}
        """Plans of captured graphs, by bucket."""
        self._storage: Storage | None = None
        self._scratch: Scratch | None = None

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """It needs a Triton that is new enough."""
        return cls.triton_fault()

    @staticmethod
    def triton_fault() -> str | None:
        """Why the kernels cannot be compiled with what is installed, or None."""
        if find_spec("triton") is None:
            return "Triton is not installed: pip install triton"
        try:
            found = version("triton")
        except PackageNotFoundError:  # a build for another accelerator has a name of its own
            return None
        newer = tuple(map(int, found.split(".")[:2])) >= _TRITON
        return None if newer else f"it needs Triton {_TRITON[0]}.{_TRITON[1]} or newer, {found} is installed"

    def _register_tiles(self, asked: object) -> RegisterTiles | None:
        """None where the portable kernel decodes: it is asked for, or the other one cannot."""
        if asked is not None and not in_registers(asked):
            return None
        found = self._launch.register_tiles(self.spec, self.layout, self.device.torch_device, self.tuning)
        if found is None and asked is not None:
            raise ValueError("option decode has registers, and these layers cannot be decoded from registers here")
        return found

    @abstractmethod
    def tune(self) -> Tuning:
        """The tiles for this device, spec and block size. Raises ValueError on what the device cannot do."""

    @abstractmethod
    def count_processors(self) -> int:
        """How many programs the device surely runs side by side."""

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Plan:
        """Share out the step's work, on the device: nothing is read back."""
        held = None if bucket is None else self._held.get(bucket)
        if held is None or not self._fits(batch, held):
            plan = self._made(batch, keep=bucket is not None and held is None)
            if bucket is not None and held is None:
                self._held[bucket] = plan
            return plan
        held.query_starts.copy_(batch.query_starts)
        held.contexts.copy_(batch.context_lengths)
        held.table[:, : batch.block_table.shape[1]].copy_(batch.block_table)
        self._share_out(held)
        return held

    def _made(self, batch: AttentionBatch, *, keep: bool) -> Plan:
        """A new plan. To keep it is to copy what it reads, which is core's."""
        starts, contexts, table = batch.query_starts, batch.context_lengths, batch.block_table.contiguous()
        if keep:
            if self._storage is None or not self._storage.holds(table):
                self._storage = Storage(starts.clone(), contexts.clone(), table.clone())
            starts, contexts, table = self._storage.filled(starts, contexts, table)
        tiles, decodes = None, self._decoding(batch)
        if others := batch.rows - decodes:
            room = (len(batch.slots) - decodes) // self._tokens + others
            tiles = torch.empty(2, room, dtype=torch.int32, device=contexts.device)
        plan = Plan(starts, contexts, table, self._decodes(batch), tiles)
        self._share_out(plan)
        return plan

    def _decodes(self, batch: AttentionBatch) -> Decodes | None:
        rows, spec, device = self._decoding(batch), self.spec, batch.context_lengths.device
        if not rows:
            return None
        tile, fills, few = self.tuning.decode, rows * spec.kv_heads > self.processors, 0
        if self._tiles is not None:
            fills = rows * spec.kv_heads > self.processors * self._tiles.few.per_processor
            tile = (self._tiles.many if fills else self._tiles.few).decode
            token = 2 * spec.kv_heads * spec.head_size * spec.kv_dtype.itemsize
            few = self._tiles.streamed_megabytes * 1_000_000 // token
        wanted = max(1, self.processors * tile.per_processor // spec.kv_heads)
        # Few rows have at most one item more each than run at a time; many are cut finer where one is far longer.
        room = _TURNS * wanted + rows if fills else wanted + rows - 1
        if self._scratch is None or not self._scratch.holds(room, rows):
            self._scratch = Scratch.of(spec, room, rows, device)
        items = torch.empty(room, FIELDS, dtype=torch.int32, device=device)
        return Decodes(rows, tile, wanted, few, items, self._scratch)

    def _decoding(self, batch: AttentionBatch) -> int:
        """Rows for the decoding kernel: none where a token's bits must not depend on which kernel it is computed by."""
        return 0 if self.spec.batch_invariant else batch.decodes

    @property
    def _tokens(self) -> int:
        """Query tokens of a prefill tile."""
        return self.tuning.prefill.queries // self.spec.group

    def _share_out(self, plan: Plan) -> None:
        if plan.decodes is not None:
            self._launch.split(plan.decodes, plan.contexts, plan.table, self.block_size, self.spec.window)
        if plan.tiles is not None:
            first = 0 if plan.decodes is None else plan.decodes.rows
            self._launch.cut(plan.tiles, plan.query_starts, first, self._tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache, plan: Plan, layer: int) -> Tensor:
        """As the contract says; keys and values come from the cache, this step's too."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if plan.decodes is not None:
            self._decode(out, query, cache, plan, plan.decodes, layer)
        if plan.tiles is not None:
            self._prefill(out, query, cache, plan, plan.tiles, self.tuning.prefill, layer)
        return out

    def _fits(self, batch: AttentionBatch, held: Plan) -> bool:
        """Can the plan of a captured graph take it: the same rows that decode, a table that is no wider?"""
        decodes = 0 if held.decodes is None else held.decodes.rows
        return self._decoding(batch) == decodes and batch.block_table.shape[1] <= held.table.shape[1]
