"""Loading a model: from a folder, a GGUF file, a hub name, or random weights for a configuration."""

import json
import logging
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from octavo.models.alibi import route
from octavo.models.bridge import ATTENTION_NAME, UnsupportedModel
from octavo.models.gguf import read_tokenizer
from octavo.models.kv_scales import ENDS
from octavo.models.quiet import quiet
from octavo.models.source import ModelNotFound, Source, configuration_at, find
from octavo.models.support import refusals

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_LONGEST = {"bloom": ("seq_length", 2048), "mpt": ("max_seq_len", None)}
"""What architectures call max_position_embeddings, and what it is where they leave it out. BLOOM was trained on 2048
tokens at a time (arXiv 2211.05100)."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what octavo needs to know about it."""

    model: PreTrainedModel
    """In evaluation mode, on its device."""
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    """None if the checkpoint has none: it can be given token ids then."""
    generation_config: GenerationConfig
    eos_token_ids: frozenset[int]
    """Each of them ends generation: those of the generation configuration, the configuration and the tokenizer."""
    max_position: int
    """Tokens that a context may have."""
    name: str
    dtype: torch.dtype
    files: tuple[Path, ...] = ()
    """Of safetensors, from which the weights came; none for a GGUF file and for random weights."""
    tokenizer_at: str | None = None
    """The folder or the hub name with the tokenizer's files; None for a GGUF file's, put together from it."""


def load(
    model: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention: str | None = ATTENTION_NAME,
    progress: bool = True,
) -> LoadedModel:
    """Load a causal language model from a folder, a `.gguf` file or a hub name.

    `dtype` is that of the weights, `auto` the checkpoint's own (float32 for GGUF, whose quantized weights are made
    dense). `attention` names an entry of transformers' attention interface, None the one that it prefers.
    Raises `ModelNotFound`, `UnsupportedModel` before any weight is read, or ValueError for a damaged file.
    """
    source = find(model, {"revision": revision, "trust_remote_code": trust_remote_code})
    try:
        with quiet(progress=progress, hide_stderr=source.gguf_file is not None):
            config = _read_config(source)
            _refuse_unsupported(config, source)
            tokenizer, ends = _read_tokenizer(source)
            loaded = _read_weights(source, config, torch.device(device), dtype=dtype, attn_implementation=attention)
            files = _weight_files(source)
    except (SafetensorError, struct.error) as error:
        raise ValueError(f"{model} cannot be read: {error}; the file is damaged, fetch it again") from error
    place = source.location if source.gguf_file is None else None
    return replace(_describe(loaded, tokenizer, ends, str(model)), files=files, tokenizer_at=place)


def load_random(
    config: PreTrainedConfig | str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    seed: int = 0,
    trust_remote_code: bool = False,
    attention: str | None = ATTENTION_NAME,
) -> LoadedModel:
    """Build a model with random weights from a configuration, or from the folder or file that has it.

    The weights are drawn where they stay: the same for the same seed, device and dtype. No token ends generation: what
    benchmarks need of a model that is not at hand. A folder's tokenizer is read if there is one. `dtype` as in `load`.
    Raises `ModelNotFound` or `UnsupportedModel`.
    """
    options, tokenizer, where = {"revision": None, "trust_remote_code": trust_remote_code}, None, torch.device(device)
    with quiet(progress=False):
        if isinstance(config, PreTrainedConfig):
            built, source = config, Source(config.name_or_path or config.model_type, None, options)
        else:
            source = Source(str(configuration_at(config)), None, options)
            built = _read_config(source)
            tokenizer = _read_tokenizer(source)[0] if Path(source.location).is_dir() else None
        _refuse_unsupported(built, source)
        wanted = (built.dtype or torch.float32) if dtype == "auto" else dtype
        generators = [] if where.type == "cpu" else [where]
        with torch.random.fork_rng(generators, device_type=where.type), where:
            torch.manual_seed(seed)
            auto: Any = AutoModelForCausalLM
            model = auto.from_config(
                built, dtype=wanted, attn_implementation=attention, trust_remote_code=trust_remote_code
            ).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    described = _describe(model, None, frozenset(), source.location)
    return replace(described, tokenizer=tokenizer, tokenizer_at=source.location)


def _read_config(source: Source) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(source.location, gguf_file=source.gguf_file, **source.options)
        return cast(PreTrainedConfig, config)
    except OSError as error:
        if Path(source.location).exists():
            raise
        raise ModelNotFound(
            f"there is no folder {Path(source.location).absolute()}, and the hub's {source.location} could not be had "
            f"({_first_line(error)}); give the path of a folder or a .gguf file, or download it where there is a "
            f"network (hf download {source.location} --local-dir FOLDER); HF_HUB_OFFLINE=1 uses the hub's cache alone"
        ) from error
    except StrictDataclassError as error:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} does not take the configuration of {source.location}: "
            f"{' '.join(str(error).split())}"
        ) from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(
                f"{source.location} brings its own model code; allow it to run with trust_remote_code"
            ) from error
        if "model type" not in str(error) and "architecture" not in str(error):
            raise
        raise UnsupportedModel(
            f"transformers {transformers.__version__} does not know the architecture of {source.location}: "
            f"{_first_line(error)}"
        ) from error


def _refuse_unsupported(config: PreTrainedConfig, source: Source) -> None:
    model_class: type[PreTrainedModel] | None = None
    mapping: Any = AutoModelForCausalLM._model_mapping
    remote = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
    if remote and source.options.get("trust_remote_code"):
        model_class = get_class_from_dynamic_module(remote, source.location, revision=source.options["revision"])
    elif type(config) in mapping:
        model_class = mapping[type(config)]
    if reasons := refusals(config, model_class):
        raise UnsupportedModel(f"{source.location} ({config.model_type}) cannot be served: {'; '.join(reasons)}")


def _read_tokenizer(source: Source) -> tuple[PreTrainedTokenizerBase | None, frozenset[int]]:
    """Return the tokenizer if there is one, and ids that end generation besides its own."""
    folder = Path(source.location)
    if source.gguf_file is not None:
        return read_tokenizer(folder / source.gguf_file)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None, frozenset()
    return AutoTokenizer.from_pretrained(source.location, **source.options), frozenset()


def _read_weights(source: Source, config: PreTrainedConfig, device: torch.device, **options: Any) -> PreTrainedModel:
    if source.gguf_file is not None:  # without `dequantize`, a machine with the `kernels` package keeps packed weights
        options |= {"gguf_file": source.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
    if device.type != "cpu":
        options["device_map"] = {"": device}
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel
    model, info = auto.from_pretrained(
        source.location,
        config=config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused here, in a sentence
        **source.options,
        **options,
    )
    if mismatched := sorted(info["mismatched_keys"]):
        name, there, wanted = mismatched[0]
        raise ValueError(
            f"the checkpoint {source.location} has {len(mismatched)} weights of other shapes than its model, {name} "
            f"{tuple(there)} instead of {tuple(wanted)} among them: it is of another architecture than its config.json "
            "says, or of one that transformers does not have"
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"the checkpoint {source.location} lacks {len(missing)} weights of its model, {missing[0]} among them; "
            "it is incomplete, or of another architecture than its config.json says"
        )
    if unused := sorted(name for name in info["unexpected_keys"] if not name.endswith(ENDS)):
        logger.warning(
            "%d weights of %s are not used, %s among them: transformers' %s does not know them, answers may be wrong",
            len(unused), source.location, unused[0], type(model).__name__,
        )  # fmt: skip
    return model


def _weight_files(source: Source) -> tuple[Path, ...]:
    """The files of safetensors beside the config.json that was read, a name's in the hub's cache."""
    if source.gguf_file is not None:
        return ()
    config = cached_file(source.location, "config.json", revision=source.options["revision"], local_files_only=True)
    folder = Path(str(config)).parent
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        return (folder / SAFE_WEIGHTS_NAME,)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    shards = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else set()
    return tuple(folder / name for name in sorted(shards))


def _describe(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, ends: frozenset[int], name: str
) -> LoadedModel:
    config = model.config
    longest, usual = _LONGEST.get(config.model_type, ("max_position_embeddings", None))
    max_position = getattr(config, longest, None) or usual
    if max_position is None:
        raise UnsupportedModel(f"the configuration of {name} does not say {longest}")
    if config._attn_implementation == ATTENTION_NAME:
        route(model)
    named = [model.generation_config.eos_token_id, config.eos_token_id, tokenizer and tokenizer.eos_token_id]
    for ids in named:
        ends |= frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if ends:
        model.generation_config.eos_token_id = sorted(ends)
    return LoadedModel(
        model=model,
        config=config,
        tokenizer=tokenizer,
        generation_config=model.generation_config,
        eos_token_ids=ends,
        max_position=max_position,
        name=name,
        dtype=model.dtype,
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
