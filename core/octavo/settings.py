"""Every setting of octavo, once: its name, default and meaning.

A setting is given as an argument under its name, by a flag (`--max-total-tokens`), by the variable that is its name in
capitals (`MAX_TOTAL_TOKENS`), or in a TOML file (`max_total_tokens = 2048`): the first of these that has it wins. The
names are those of TGI where it has them. Nothing else in core reads the environment.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, ValidationError
from pydantic_settings import NoDecode

from octavo.settings_server import ServerSettings

logger = logging.getLogger(__name__)


class SettingsError(ValueError):
    """A setting that cannot be, with where it came from and what it may be."""


def variable(setting: str) -> str:
    """The environment variable of a setting."""
    return setting.upper()


def flag(setting: str) -> str:
    """The command-line flag of a setting."""
    return "--" + setting.replace("_", "-")


def _mapping(value: object) -> object:
    """A JSON text as the mapping it says."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f'it must be a JSON object, e.g. {{"name": 1}}: {error}') from None


def _cache_folder() -> Path:
    """Where applications keep what they can make again (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def cache_folder() -> Path:
    """The setting `octavo_cache`, for what is needed before there are settings."""
    return Path(os.environ.get("OCTAVO_CACHE") or _cache_folder()).expanduser()


def named_compiler() -> str | None:
    """The C++ compiler that the user prefers, by the usual variable."""
    return os.environ.get("CXX")


class Settings(ServerSettings):
    """All settings; an argument that is None counts as not given. Raises `SettingsError`."""

    model_id: str | None = Field(
        None,
        description="The model: a folder with a checkpoint, a GGUF file, or a name on the hub. Unset: the demo model.",
    )
    revision: str | None = Field(None, description="Commit, branch or tag of a model on the hub.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Of weights and activations. auto: the checkpoint's, float32 on a CPU.",
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Of cached keys and values. auto: the same as dtype.",
    )
    device: str = Field("auto", description="cpu, cuda, rocm, xpu, or a plugin's. auto: the best that is available.")
    attention: str | None = Field(
        None,
        description="The attention backend: NAME, PLATFORM/NAME, or prefill=NAME,decode=NAME. Unset: the best one.",
    )
    attention_options: Annotated[dict[str, Any], NoDecode, BeforeValidator(_mapping)] = Field(
        {},
        description="Options of the attention backend, a JSON object.",
    )
    compile: bool | None = Field(
        None,
        description="Compile the model: faster steps, for a start that takes seconds longer. Needs a C++ compiler. "
        "Unset: on a CPU, where there is one and the model can be compiled.",
    )
    block_size: PositiveInt | None = Field(
        None,
        description="Tokens in a cache block. Unset: what the attention backend prefers.",
    )
    prefix_caching: bool | None = Field(
        None,
        description="Reuse the keys and values of prompts that begin alike. Unset: wherever the backend can.",
    )
    max_input_tokens: PositiveInt | None = Field(
        None,
        description="Longest prompt, tokens. Unset: one less than max_total_tokens.",
    )
    max_total_tokens: PositiveInt | None = Field(
        None,
        description="Most tokens of one request, prompt and answer. Unset: what the model and the cache allow.",
    )
    max_batch_prefill_tokens: PositiveInt = Field(
        4096,
        description="Most prompt tokens that one step computes; longer prompts are computed in chunks.",
    )
    max_batch_total_tokens: PositiveInt | None = Field(
        None,
        description="Tokens that the cache holds, of all running requests together. Unset: what the memory allows.",
    )
    max_batch_size: PositiveInt | None = Field(None, description="Most requests that run at once. Unset: no limit.")
    waiting_served_ratio: float = Field(
        0.0,
        ge=0,
        description="While requests run, admit new ones only once there are this many times as many; 0: at once.",
    )
    max_waiting_tokens: int = Field(
        20,
        ge=0,
        description="After this many steps new requests are admitted whatever waiting_served_ratio says.",
    )
    tgi_wiggle_room: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Unset max_batch_total_tokens: the cache's share of free memory (on a CPU, of a quarter of it).",
    )
    engine_restarts: int = Field(
        5,
        ge=0,
        description="How often in a row the server starts its engine again when the engine's process dies.",
    )
    engine_restart_seconds: float = Field(
        1.0,
        ge=0,
        description="How long the server waits before it does so; twice as long each further time, a minute at most.",
    )
    octavo_cache: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        default_factory=_cache_folder,
        description="The folder in which octavo keeps what it made, such as the converted demo model.",
    )

    octavo_config: Path | None = Field(
        None,
        description="A TOML file with settings by their names; variables and flags win over it.",
    )

    def __init__(self, **given: Any) -> None:
        arguments = {name: value for name, value in given.items() if value is not None}
        for name, right in misspelt_variables(os.environ):
            logger.warning("the variable %s has no effect, did you mean %s?", name, right)
        sources = _sources(arguments)
        if file := arguments.get("octavo_config") or os.environ.get(variable("octavo_config")):
            for name, value in _from_file(Path(file).expanduser()).items():
                if name not in sources:
                    arguments[name], sources[name] = value, f"in {file}"
        try:
            super().__init__(**_with_current_names(arguments, sources))
        except ValidationError as error:
            raise SettingsError("; ".join(_wrong_values(error, sources))) from None
        problem = next(self._contradictions(sources), None)
        if problem is not None:
            raise SettingsError(problem)

    def _contradictions(self, sources: Mapping[str, str]) -> Iterator[str]:
        """Settings that cannot be together, or that have no effect; defaults give way and are not looked at."""
        for lower, upper, equal, why in _ORDERED:
            if lower in sources and upper in sources:
                low, high = getattr(self, lower), getattr(self, upper)
                if low > high or (low == high and not equal):
                    limit = f"{'at most' if equal else 'below'} {upper}, which is {high} ({sources[upper]})"
                    yield f"{lower} is {low} ({sources[lower]}), it must be {limit}: {why}"
        if "max_waiting_tokens" in sources and not self.waiting_served_ratio:
            yield (
                f"max_waiting_tokens is {self.max_waiting_tokens} ({sources['max_waiting_tokens']}) and has no effect, "
                "since waiting_served_ratio is 0 and nothing waits: set WAITING_SERVED_RATIO above 0 too, or neither"
            )


_ORDERED = (
    ("max_input_tokens", "max_total_tokens", False, "the answer needs room for a token at least"),
    ("max_input_tokens", "max_batch_total_tokens", False, "a request must fit into the cache"),
    ("max_total_tokens", "max_batch_total_tokens", True, "a request must fit into the cache"),
    ("max_batch_prefill_tokens", "max_batch_total_tokens", True, "no step can compute more than the cache holds"),
    ("block_size", "max_batch_total_tokens", True, "the cache must hold a block at least"),
)

_FORMER_NAMES = {"max_input_length": "max_input_tokens"}
"""Names that TGI gave up and still takes."""

_ELSEWHERE = {"ATTENTION_BACKEND": "attention", "VLLM_ATTENTION_BACKEND": "attention", "MODEL": "model_id"}
"""What other servers call it."""


def misspelt_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that are set and look meant for a setting, each with the variable that is read."""
    right = {variable(name) for name in (*Settings.model_fields, *_FORMER_NAMES)}
    long_enough = [name for name in right if len(name) >= 8]
    for name in sorted(environment):
        if name.upper() in right:
            continue
        bare = name.upper().removeprefix("OCTAVO_").removeprefix("TGI_").removeprefix("VLLM_")
        close = difflib.get_close_matches(bare, long_enough, n=1, cutoff=0.84)
        if name in _ELSEWHERE:
            yield name, variable(_ELSEWHERE[name])
        elif bare in right:
            yield name, bare
        elif close:
            yield name, close[0]


def _sources(arguments: Mapping[str, object]) -> dict[str, str]:
    """Where each setting that is not at its default comes from."""
    known = (*Settings.model_fields, *_FORMER_NAMES)
    variables = {name.lower(): f"variable {name}" for name, value in os.environ.items() if value}
    return {name: source for name, source in variables.items() if name in known} | dict.fromkeys(arguments, "argument")


def _with_current_names(arguments: Mapping[str, object], sources: dict[str, str]) -> dict[str, Any]:
    """The arguments, and what is set under a former name."""
    current = dict(arguments)
    for former, name in _FORMER_NAMES.items():
        if former in sources:
            if name in sources:
                raise SettingsError(
                    f"{former} ({sources[former]}) is the former name of {name} ({sources[name]}): set one of them"
                )
            sources[name] = f"{sources.pop(former)}, by its former name {former}"
            current[name] = current.pop(former) if former in current else _environment_value(former)
    return current


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"octavo_config is {path}, which cannot be read as a TOML file: {error}") from None


def _environment_value(setting: str) -> str:
    return next(value for name, value in os.environ.items() if name.lower() == setting and value)


def _wrong_values(error: ValidationError, sources: Mapping[str, str]) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, Settings.model_fields, n=1)
            told = f", did you mean {close[0]}?" if close else ""
            yield f"there is no setting {name}{told}" + (
                f" ({sources[name]})" if "in " in sources.get(name, "") else ""
            )
        else:
            value = "not shown" if name == "api_key" else repr(problem["input"])
            yield f"{name} is {value} ({sources[name]}): {message[0].lower()}{message[1:]}"
