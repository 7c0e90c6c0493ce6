"""The case about the whole engine: tiny models answer as transformers' own attention makes them."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import BUILT_IN, Device
from octavo.attention.phases import parts
from octavo.conformance import grids
from octavo.conformance.registry import case
from octavo.conformance.stage import Stage
from octavo.conformance.truth import Deviation, Fault
from octavo.hooks import PROJECT, hookimpl
from octavo.plugins import Plugins

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from octavo.engine.engine import Engine

VOCABULARY = 128
NEW_TOKENS = 10
LENGTHS = (37, 50, 5, 44)
"""Of the prompts: they do not fit into the cache together, the first two begin alike."""
_ALIKE = 24
_CHUNK = 24
"""Prompt tokens of a step, where prompts may be cut."""

LIMITS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
"""By how many standard deviations of the logits a token may be less likely than the likeliest. Rounding makes two that
are nearly as likely change places; a wrong token is below by 2 or 3."""


@case(grids.generation)
def generation(stage: Stage) -> None:
    """Tiny models generate the reference's greedy tokens through the whole engine: in chunks, from cached prefixes."""
    from octavo.models.quiet import quiet

    stage.limit = Deviation(LIMITS.get(stage.spec.dtype, LIMITS[torch.bfloat16]), 1.0)
    model = _model(stage)
    prompts = [torch.randint(VOCABULARY, (length,), generator=stage.generator).tolist() for length in LENGTHS]
    prompts[1][:_ALIKE] = prompts[0][:_ALIKE]
    with tempfile.TemporaryDirectory() as folder:
        with quiet(progress=False):
            model.save_pretrained(folder)
        with _unlogged():  # a step that fails is told once, in the report
            answers = _answers(Path(folder), stage, prompts)
    for answered, what in answers:
        for prompt, tokens in zip(prompts, answered, strict=True):
            _judge(stage, model, prompt, tokens, what)


def _answers(folder: Path, stage: Stage, prompts: Sequence[list[int]]) -> list[tuple[list[list[int]], str]]:
    """Greedy tokens of each prompt, at first and once more with what is cached."""
    from octavo.engine.sampling_params import SamplingParams
    from octavo.llm import LLM

    backend, size = stage.backend, stage.configuration.block_size
    llm = LLM(
        folder, attention=backend.qualified_name(), device=backend.device.name, dtype=_word(stage.spec.dtype),
        kv_cache_dtype=_word(stage.spec.kv_dtype), block_size=size, max_batch_total_tokens=max(112, 2 * size),
        max_batch_prefill_tokens=_CHUNK, max_batch_size=len(prompts), compile=False, progress=False,
        plugins=_at_hand(type(backend), type(backend.device)),
    )  # fmt: skip
    _soil(llm.engine)
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    found = []
    for what in ("at first", "again, with what is cached"):
        tokens = []
        for output in llm.generate(prompts, greedy, progress=False):
            (answer,) = output.completions
            if answer.error:
                raise Fault(f"{what}, a request ended with an error: {answer.error}")
            tokens.append(list(answer.token_ids))
        found.append((tokens, what))
    return found


def _soil(engine: Engine) -> None:
    """NaN in every slot of every layer, block 0's too."""
    kv = engine.scheduler.kv
    for group in engine.runner.groups:
        spec, device = group.backend.spec, group.backend.device.torch_device
        slots = torch.arange(kv.pool.num_blocks * kv.block_size, device=device)
        nan = torch.full((len(slots), spec.kv_heads, spec.head_size), torch.nan, dtype=spec.dtype, device=device)
        for layer in range(spec.layers):
            group.backend.layout.write(group.cache, layer, nan, nan, slots)


@contextmanager
def _unlogged() -> Iterator[None]:
    """What goes wrong is told once, in the report."""
    logger = logging.getLogger(PROJECT)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _word(dtype: torch.dtype) -> str:
    """As the settings spell it."""
    return str(dtype).removeprefix("torch.").replace("float8", "fp8")


@torch.inference_mode()
def _judge(stage: Stage, model: PreTrainedModel, prompt: list[int], tokens: list[int], what: str) -> None:
    """Each token must be as likely as the likeliest, behind those before it, but for rounding."""
    logits: Tensor = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    if len(tokens) != NEW_TOKENS:
        raise Fault(f"{what}: the prompt of {len(prompt)} tokens got {len(tokens)} new ones instead of {NEW_TOKENS}")
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    below = (logits.amax(dim=1) - chosen) / logits.std(dim=1)
    stage.deviation = stage.deviation.worse(Deviation(float(below.max()), 1.0))
    for place in (below > stage.limit.error).nonzero()[:1, 0].tolist():
        likeliest, deviations = int(logits[place].argmax()), float(below[place])
        raise Fault(
            f"{what}: behind a prompt of {len(prompt)} tokens, new token {place} is {tokens[place]}; "
            f"the reference's is {likeliest}, whose logit is {deviations:.2g} standard deviations higher "
            f"(limit {stage.limit.error:g})"
        )


def _model(stage: Stage) -> PreTrainedModel:
    """float32 on the CPU, with transformers' attention; its weights are numbers of the dtype that is tried."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    kind, own = _architecture(stage)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=stage.spec.layers,
        num_attention_heads=stage.spec.heads, num_key_value_heads=stage.spec.kv_heads, head_dim=stage.spec.head_size,
        max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        dtype=torch.float32, **own,
    )  # fmt: skip
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    _randomize(model, stage)
    model.eval()
    return model


def _architecture(stage: Stage) -> tuple[str, dict[str, Any]]:
    """What has the features of the configuration, and what it is told beyond the usual."""
    window, softcap = stage.spec.window, stage.spec.softcap
    if softcap is not None:
        kinds = ["sliding_attention" if window and layer % 2 == 0 else "full_attention" for layer in range(2)]
        return "gemma2", {"sliding_window": window or 256, "attn_logit_softcapping": softcap, "layer_types": kinds}
    return ("llama", {}) if window is None else ("mistral", {"sliding_window": window})


@torch.no_grad()
def _randomize(model: PreTrainedModel, stage: Stage) -> None:
    """So large that tokens vary, and hang on far ones by peaked attention."""
    for name, parameter in model.named_parameters():
        drawn = stage.randn(*parameter.shape)
        if parameter.dim() == 1:
            drawn = parameter + 0.2 * drawn
        else:
            drawn *= 0.5 if "embed" in name else 3.0 * min(parameter.shape) ** -0.5
        parameter.copy_(drawn.to(stage.spec.dtype))


def _at_hand(backend: type[AttentionBackend], device: type[Device]) -> Plugins:
    """As if a distribution brought this backend and this device: whether they are installed is not what is asked."""

    class Offer:
        @hookimpl
        def octavo_attention_backends(self) -> list[type[AttentionBackend]]:
            return list(parts(backend))

        @hookimpl
        def octavo_devices(self) -> list[type[Device]]:
            return [] if device in BUILT_IN else [device]

    class AtHand(EntryPoint):
        def load(self) -> object:
            return Offer()

    return Plugins([AtHand(backend.name, backend.__module__, PROJECT)])
