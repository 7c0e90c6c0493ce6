"""Decoding by the C++ kernel, prompts by PyTorch's fused attention."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from octavo import native
from octavo.attention.contract import AttentionBatch, AttentionSpec, Capabilities
from octavo.attention.device import Device
from octavo.kv.layout import KVCache, LayoutType
from octavo_cpu import layout
from octavo_cpu.layout import CPULayout
from octavo_reference.backend import Prefill, ReferenceBackend

_SOURCE = Path(__file__).with_name("decode.cpp")
_ELEMENTS = (torch.float32, torch.bfloat16, torch.float16)
"""Of a cache, in the kernel's order."""
_LANES = 8
"""Elements of the kernel's vectors: a head is a whole number of them."""
_PART_TOKENS = 512
"""Fewest tokens of a context that are worth a part of their own."""


@dataclass(frozen=True, slots=True)
class Decode:
    """The rows that decode, in one step."""

    rows: int
    shape: Any
    """What the kernel calls Shape."""
    table: Tensor
    """[rows, width] int32, contiguous."""
    contexts: Tensor
    """[rows] int32."""
    parts: int
    """Into how many each context is split, so that few long rows keep all threads busy."""
    scratch: Tensor
    """float32: each part's partial softmax."""


class FlashDecodingBackend(ReferenceBackend):
    """Split-KV decoding in C++ with OpenMP, in float32, for any head size that is a multiple of 8."""

    name = "flashdecoding"
    platform = "cpu"
    contract = 1
    priority = 10
    capabilities = Capabilities(
        dtypes=_ELEMENTS,
        kv_dtypes=_ELEMENTS,
        head_sizes=tuple(range(_LANES, 513, _LANES)),
        block_sizes=(32, ...),
        features=frozenset({"window", "softcap", "sinks", "alibi"}),
        prefix_caching=True,
        batch_invariant=True,
    )
    layout_type: ClassVar[LayoutType] = CPULayout.of

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Builds the kernel if this machine has not yet. Raises RuntimeError with the compiler's words."""
        self.refuse(options or {})
        self._kernel = _kernel()
        super().__init__(spec, block_size, device, None, sinks)
        self._slopes_at = None if self._slopes is None else self._slopes.data_ptr()

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """It runs on a CPU whose C++ compiler can build its kernel, which is tried once on a machine: seconds."""
        if device.name != "cpu":
            return f"it runs on a cpu, not on {device.name}"
        return native.fault(layout.SOURCE) or native.fault(_SOURCE)

    def plan_decode(self, batch: AttentionBatch, contexts: list[int]) -> Decode | None:
        """Split long contexts so that every thread has work, unless that would show in a row's bits."""
        if not contexts:
            return None
        rows, spec = len(contexts), self.spec
        wanted = -(-2 * torch.get_num_threads() // (rows * spec.kv_heads))
        parts = 1 if spec.batch_invariant else max(1, min(wanted, max(contexts) // _PART_TOKENS))
        table = batch.block_table[:rows].contiguous()
        shape = _shape(
            spec.heads, spec.kv_heads, spec.head_size, self.block_size, table.shape[1], spec.scale, spec.softcap or 0.0,
            spec.window or 0, _ELEMENTS.index(spec.kv_dtype),
        )  # fmt: skip
        scratch = torch.empty(rows * spec.kv_heads * parts * self._kernel.part_floats(shape), dtype=torch.float32)
        return Decode(rows, shape, table, batch.context_lengths[:rows].contiguous(), parts, scratch)

    def attend_decode(self, query: Tensor, cache: KVCache, plan: Decode, layer: int) -> Tensor:
        """query [rows, heads, head_size] -> the same shape."""
        dtype, query = query.dtype, query.float()
        out = query.new_empty(query.shape)
        sinks = None if self.sinks is None else self.sinks[layer].contiguous()
        self._kernel.decode(
            plan.shape,
            *_strided(query), cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(),
            plan.table.data_ptr(), plan.contexts.data_ptr(), plan.rows, plan.parts,
            None if sinks is None else sinks.data_ptr(), self._slopes_at, plan.scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out.to(dtype)

    def read_context(self, cache: KVCache, row: Prefill, layer: int) -> tuple[Tensor, Tensor]:
        """As the reference's, by one call."""
        return cast(CPULayout, self.layout).gather(cache, layer, row.blocks, row.context)


class Shape(ctypes.Structure):
    """What the kernel calls Shape."""

    _fields_ = (
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("element", ctypes.c_int64),
    )


@cache
def _kernel() -> Any:
    """The library with its functions' types. Raises RuntimeError with the compiler's words."""
    library = native.load(_SOURCE)
    shape, pointer, number = ctypes.POINTER(Shape), ctypes.c_void_p, ctypes.c_int64
    strided = (pointer, number, number)
    library.part_floats.argtypes, library.part_floats.restype = (shape,), number
    library.decode.restype = None
    library.decode.argtypes = (shape, *strided, *[pointer] * 4, number, number, *[pointer] * 4)
    return library


@cache
def _shape(
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    width: int,
    scale: float,
    softcap: float,
    window: int,
    element: int,
) -> Any:
    return ctypes.pointer(Shape(heads, kv_heads, size, block_size, width, scale, softcap, window, element))


def _strided(tensor: Tensor) -> tuple[int, int, int]:
    """[tokens, heads, size] as the kernel takes it: where, from token to token, from head to head."""
    tokens, heads, _ = tensor.stride()
    return tensor.data_ptr(), tokens, heads
