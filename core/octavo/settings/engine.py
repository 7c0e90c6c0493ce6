"""The settings of a model and its engine: a part of `octavo.settings.Settings`, which reads and checks them."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic_settings import NoDecode

from octavo.settings.group import SettingsGroup


class Model(SettingsGroup):
    """What is served, and where it runs."""

    group = "Model"

    model_id: str | None = Field(
        None,
        description="The model: a folder with a checkpoint, a GGUF file, a name on the hub, or demo. Unset: demo.",
    )
    revision: str | None = Field(None, description="Commit, branch or tag of a model on the hub.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Of weights and activations. auto: the checkpoint's, float32 on a CPU.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="Where weights come from. auto: the checkpoint. dummy: they are drawn at random for the "
        "configuration in a folder or a file; no weights are read. For benchmarks.",
    )
    device: str = Field("auto", description="cpu, cuda, rocm, xpu, or a plugin's. auto: the best that is available.")
    cuda_memory_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of a GPU's memory that octavo may take: weights, activations, graphs and cache together.",
    )
    compile: bool | None = Field(
        None,
        description="Compile the model: faster steps, for a start that takes seconds longer. Needs a C++ compiler. "
        "Unset: where there is one, or Triton for a GPU, and the model can be compiled; octavo generate if told to.",
    )


def _mapping(value: object) -> object:
    """A JSON text as the mapping it says."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f'it must be a JSON object, e.g. {{"name": 1}}: {error}') from None


class Cache(SettingsGroup):
    """How attention is computed, and the blocks of keys and values that it reads."""

    group = "Attention and cache"

    attention: str | None = Field(
        None,
        description="The attention backend: NAME, PLATFORM/NAME, or prefill=NAME,decode=NAME. Unset: the best one.",
    )
    attention_options: Annotated[dict[str, Any], NoDecode, BeforeValidator(_mapping)] = Field(
        {},
        description="Options of the attention backend, a JSON object.",
    )
    prefix_caching: bool | None = Field(
        None,
        description="Reuse the keys and values of prompts that begin alike. Unset: wherever the backend can.",
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3fn", "fp8_e5m2", "fp8_e4m3fnuz"] = Field(
        "auto",
        description="Of cached keys and values. auto: as dtype. fp8: half as large, scaled as the checkpoint says.",
    )
    block_size: PositiveInt | None = Field(
        None,
        description="Tokens in a cache block. Unset: what the attention backend prefers.",
    )
    max_batch_total_tokens: PositiveInt | None = Field(
        None,
        description="Tokens that the cache holds, of all running requests together. Unset: what the memory allows, as "
        "measured at the start.",
    )
    tgi_wiggle_room: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Unset max_batch_total_tokens: the cache's share of the memory that the largest step leaves free "
        "(on a CPU, of a quarter of it).",
    )


def _sizes(value: str | None) -> str | None:
    """Numbers with commas between them, as TGI takes them, or auto."""
    if value is not None and not re.fullmatch(r"auto|\s*\d+\s*(,\s*\d+\s*)*", value):
        raise ValueError("it must be auto, or whole numbers with commas between them, e.g. 1,2,4,8, or 0")
    return value


class Batching(SettingsGroup):
    """Which requests run in a step."""

    group = "Batching"

    max_batch_prefill_tokens: PositiveInt | None = Field(
        None,
        description="Most prompt tokens that one step computes; longer prompts are computed in chunks. "
        "Unset: 4096, on a GPU 8192.",
    )
    max_batch_size: PositiveInt | None = Field(None, description="Most requests that run at once. Unset: no limit.")
    deterministic: bool = Field(
        False,
        description="A request's logits are the same to the bit alone and among others, in any chunks, from the cache, "
        "and after preemption. Every step then computes MAX_BATCH_PREFILL_TOKENS tokens, which those of requests that "
        "decode count among, and which are 256 if unset.",
    )
    cuda_graphs: Annotated[str | None, AfterValidator(_sizes)] = Field(
        None,
        description="Numbers of requests for which a step is captured and replayed on a GPU, e.g. 1,2,4,8; 0: none. "
        "Unset, or auto: up to MAX_BATCH_SIZE, or 256 where that is unset.",
    )
    waiting_served_ratio: NonNegativeFloat = Field(
        0.0,
        description="While requests run, admit new ones only once there are this many times as many; 0: at once.",
    )
    max_waiting_tokens: NonNegativeInt = Field(
        20,
        description="After this many steps new requests are admitted whatever waiting_served_ratio says.",
    )
