"""The contract between octavo and an accelerator, number 1.

Core decides which tokens run and which blocks they own. A backend decides how keys and values lie in a block and how a
query meets them. Nothing else crosses the line: core counts blocks and slots and never touches a stride; a backend
never sees a request, a scheduler or a model.

The contract grows by new fields with defaults; a change that breaks a backend raises `CONTRACT`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from types import EllipsisType

    from octavo.attention.ahead import AheadOfTime
    from octavo.attention.device import Device
    from octavo.kv.layout import KVCacheLayout, LayoutType

CONTRACT: Final = 1
"""The contract that this octavo speaks. A backend states the number it was written for; they must be equal."""

Feature = Literal["window", "softcap", "sinks", "alibi"]
"""What a model may need beyond plain causal attention: fields of `AttentionSpec`."""
Phase = Literal["prefill", "decode"]
"""Rows with several query tokens, or with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One group of layers that attend alike: all that a kernel may compile in. Head counts are for this rank.

    A model that mixes windowed and full layers has two groups: two backend objects and two caches that share block ids.
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    """Scores are `scale * query . key`."""
    dtype: torch.dtype
    """Of query, key, value and output."""
    kv_dtype: torch.dtype
    """Of the cache."""
    window: int | None = None
    """A query sees this many keys, its own among them; None: all."""
    softcap: float | None = None
    """Scores s become `softcap * tanh(s / softcap)` before the softmax (Gemma 2, arXiv 2408.00118, section 2)."""
    sinks: bool = False
    """A learned logit for each head joins the softmax and carries no value (gpt-oss; arXiv 2309.17453, section 3)."""
    alibi_slopes: tuple[float, ...] | None = None
    """A float32 number for each query head: `slope * (key position - query position)` is added to its scores, after a
    soft cap (ALiBi, arXiv 2108.12409, section 3). A position is a token's place in its row's context."""
    batch_invariant: bool = False
    """A token's output must be the same to the bit whatever else is in the batch, whether its row decodes or prefills
    and in which chunks, and whichever blocks hold its context. Only where `Capabilities.batch_invariant` says so."""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key heads: it must divide evenly")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window is {self.window}, it must be at least 1 (a token sees itself); None means no window"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap is {self.softcap}, it must be above 0; None means no cap")
        slopes = self.alibi_slopes
        if slopes is not None and not (len(slopes) == self.heads and all(map(isfinite, slopes))):
            raise ValueError(f"ALiBi slopes are {slopes}, it must be {self.heads} finite numbers, one a query head")

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def features(self) -> frozenset[Feature]:
        """What this group needs beyond plain causal attention."""
        needed: dict[Feature, bool] = {
            "window": self.window is not None,
            "softcap": self.softcap is not None,
            "sinks": self.sinks,
            "alibi": self.alibi_slopes is not None,
        }
        return frozenset(name for name, wanted in needed.items() if wanted)


class HostLengths(NamedTuple):
    """What the tensors of a batch with these names hold, on the host: nobody has to wait for the device to know it."""

    query_starts: NDArray[np.int32]
    """[rows + 1]."""
    context_lengths: NDArray[np.int32]
    """[rows]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """One packed forward: the tokens of all rows one after another, rows that decode (one query token) first.

    Row i owns query tokens `query_starts[i]:query_starts[i + 1]`, perhaps none; they are the last of its context.
    A padding row has one query token, a context of length 0 and slot -1: its output is finite and means nothing. It is
    one of those that decode in a captured graph, and comes behind all others where `AttentionSpec.batch_invariant`.
    The tensors are core's and change after the step: what a captured graph reads must be a backend's own copy.
    """

    query_starts: Tensor
    """[rows + 1] int32, starts at 0."""
    context_lengths: Tensor
    """[rows] int32: keys of each row after this step's are written."""
    block_table: Tensor
    """[rows, width] int32; entries beyond a row's context may hold anything that is a block id."""
    slots: Tensor
    """[tokens] int64: where each token's key and value go, block * block_size + offset; -1 writes nothing."""
    max_query: int
    """The longest row's query tokens. A host number, so that no device is asked for it."""
    max_context: int
    decodes: int
    """Rows at the front with exactly one query token."""
    host_lengths: HostLengths | None = None
    """For backends that share out work on the host; None where only the device knows them."""

    @property
    def rows(self) -> int:
        """Sequences in the batch."""
        return int(self.context_lengths.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do. What is not declared is not supported; `...` in a tuple says "and any other"."""

    dtypes: tuple[torch.dtype, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    head_sizes: tuple[int | EllipsisType, ...]
    block_sizes: tuple[int | EllipsisType, ...]
    """Tokens in a block, the preferred size first."""
    features: frozenset[Feature] = frozenset()
    graphs: Literal["none", "decode", "all"] = "none"
    """Which steps may be captured and replayed (see `AttentionBackend.plan`)."""
    prefix_caching: bool = False
    """May a query start behind keys that an earlier step wrote (cached prefixes, chunked prefill)?"""
    batch_invariant: bool = False
    """Can it promise what `AttentionSpec.batch_invariant` asks for?"""
    spare_slots: int = 0
    """Slots that a request reserves beyond its tokens."""
    chip: str = ""
    """Which it is that can less than the backend declares, e.g. "gfx950": refusals name it."""

    def refusals(self, spec: AttentionSpec, block_size: int | None) -> list[str]:
        """Why this cannot serve `spec` in blocks of `block_size` (None: its own choice): each with value and limit."""
        reasons, on = [], f" on {self.chip}" if self.chip else ""
        for what, asked, allowed in (
            ("dtype", spec.dtype, self.dtypes),
            ("cache dtype", spec.kv_dtype, self.kv_dtypes),
            ("head size", spec.head_size, self.head_sizes),
            ("block size", block_size, self.block_sizes),
        ):
            if asked is not None and not _allows(asked, allowed):
                reasons.append(f"{what} {_word(asked)} is not supported{on}: it takes {_words(allowed)}")
        for feature in sorted(spec.features - self.features):
            value = getattr(spec, feature, True)
            asked_for = feature if value is True else f"{feature} {value}"
            reasons.append(f"the model needs {asked_for}: it supports {_words(tuple(sorted(self.features)))}{on}")
        if spec.batch_invariant and not self.batch_invariant:
            reasons.append(
                f"deterministic is asked for: with it a token's bits depend on what else is in its batch{on}"
            )
        return reasons

    @property
    def preferred_block_size(self) -> int:
        """The first size of the list: what is taken when the user asks for none."""
        first = self.block_sizes[0] if self.block_sizes else ...
        return 16 if isinstance(first, type(...)) else first


def _allows(asked: object, allowed: tuple[object, ...]) -> bool:
    return asked in allowed or (... in allowed and isinstance(asked, int) and asked > 0)


def _word(value: object) -> str:
    return "any other" if value is ... else str(value).removeprefix("torch.")


def _words(values: tuple[object, ...]) -> str:
    return ", ".join(map(_word, values)) or "none"


class AttentionBackend(ABC):
    """How a query meets the keys and values in a cache: made once for each group of layers that attend alike."""

    name: ClassVar[str]
    """What `ATTENTION` calls it, e.g. "paged"."""
    platform: ClassVar[str]
    """Tells backends of one name apart, e.g. "cuda": `ATTENTION=cuda/paged`."""
    contract: ClassVar[int]
    """The contract number it was written for; it has no default, so that an old plugin cannot claim a new contract."""
    priority: ClassVar[int] = 0
    """Among backends that can run, the highest is chosen when `ATTENTION` is unset; below 0: only when asked for."""
    caution: ClassVar[str | None] = None
    """What one should know before choosing it, e.g. that nobody maintains its library; said where it is chosen."""
    capabilities: ClassVar[Capabilities]
    """On any device; `capabilities_on` says what it is on one."""
    layout_type: ClassVar[LayoutType]
    """(spec, block size) -> its cache layout, e.g. `octavo.kv.layout.TOKEN_MAJOR`."""
    tunables: ClassVar[Mapping[Phase, Sequence[Mapping[str, Any]]]] = {}
    """For each phase, values of the option of that name that may be best: `octavo bench kernels --tune` tries them."""

    def __init__(
        self,
        spec: AttentionSpec,
        block_size: int,
        device: Device,
        options: Mapping[str, Any] | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Keep what is compiled in: `self.spec`, `block_size`, `device`, `sinks`, and the `layout` made of them.

        `options` are the user's `ATTENTION_OPTIONS`; a backend that takes some checks them before it calls this.
        `sinks`: [layers, heads] float32, given when `spec.sinks`. Raises ValueError on an option that it does not know.
        """
        self.refuse(options or {})
        self.spec = spec
        self.block_size = block_size
        self.device = device
        self.sinks = sinks
        self.layout: KVCacheLayout = type(self).layout_type(spec, block_size)

    @classmethod
    def qualified_name(cls) -> str:
        """`platform/name`, which no other backend has."""
        return f"{cls.platform}/{cls.name}"

    @classmethod
    def refuse(cls, options: Mapping[str, Any]) -> None:
        """Raise ValueError if any option is left that the backend does not know."""
        if options:
            raise ValueError(
                f"{cls.qualified_name()} takes no such option: {', '.join(sorted(options))}. "
                "Name the backend that does with ATTENTION"
            )

    @classmethod
    def probe(cls, device: Device) -> str | None:
        """Why it cannot run on `device`, in a sentence, or None. Never raises, never slow, imports nothing heavy."""
        return None

    @classmethod
    def capabilities_on(cls, device: Device) -> Capabilities:
        """`capabilities` without what this device lacks. Asked where `probe` gives None, and as quick as that."""
        return cls.capabilities

    def workspaces(self) -> Sequence[Tensor]:
        """What it has taken of the device's memory when it is made, and keeps: the memory table counts it.

        What several backends share is counted once. The cache is sized by what is free, whether this tells or not.
        """
        return ()

    @classmethod
    def ahead(cls) -> Mapping[str, AheadOfTime]:
        """By target, e.g. "gfx942": its kernels for hardware that need not be here, which `octavo kernels` compiles.

        Raises ImportError, with the reason, where what compiles them is not installed or compiles nothing.
        """
        return {}

    def plan(self, batch: AttentionBatch, bucket: int | None = None) -> Any:
        """Prepare one step, before its first layer; what it returns reaches every `attend` of the step.

        With a `bucket` (the padded row count of a captured graph), returning the same object as at capture says
        "refreshed in place, replay is safe"; another object says "run this step eagerly".
        """
        return batch

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, cache: Any, plan: Any, layer: int) -> Tensor:
        """Attention of the packed tokens to their rows' contexts, causal.

        query: [tokens, heads, head_size]; key, value: [tokens, kv_heads, head_size], this step's, which
        `layout.write` has already put into `cache`; `layer` counts within the group. The strides of query, key and
        value are arbitrary except the last, which is 1. `key` and `value` may stand in for the cache only for rows
        whose context holds nothing older. Returns [tokens, heads, head_size] in `spec.dtype`.
        """
