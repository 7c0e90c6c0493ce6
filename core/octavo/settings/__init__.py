"""Every setting of octavo, once: its name, default and meaning.

A setting is given as an argument under its name, by a flag (`--max-total-tokens`), by the variable that is its name in
capitals (`MAX_TOTAL_TOKENS`), or in a TOML file (`max_total_tokens = 2048`): the first of these that has it wins. The
names are those of TGI where it has them. Nothing else in core reads the environment.
"""

from __future__ import annotations

import difflib
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError

from octavo.settings import values
from octavo.settings.elsewhere import FORMER_NAMES, without_effect
from octavo.settings.engine import Batching, Cache, Model
from octavo.settings.group import SettingsGroup
from octavo.settings.server import Lifecycle, Limits, Logging, Security, Server

logger = logging.getLogger(__name__)


class SettingsError(ValueError):
    """A setting that cannot be, with where it came from and what it may be."""


def variable(setting: str) -> str:
    """The environment variable of a setting."""
    return setting.upper()


def flag(setting: str) -> str:
    """The command-line flag of a setting."""
    return "--" + setting.replace("_", "-")


def _cache_folder() -> Path:
    """Where applications keep what they can make again (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def cache_folder() -> Path:
    """The setting `octavo_cache`, for what is needed before there are settings."""
    return Path(os.environ.get("OCTAVO_CACHE") or _cache_folder()).expanduser()


def named_compiler() -> str | None:
    """The C++ compiler that the user prefers, by the usual variable."""
    return os.environ.get("CXX")


class Files(SettingsGroup):
    """Where settings are read from, and where octavo writes."""

    group = "Files"

    octavo_config: Path | None = Field(
        None,
        description="A TOML file with settings by their names; variables and flags win over it.",
    )
    octavo_cache: Annotated[Path, AfterValidator(Path.expanduser)] = Field(
        default_factory=_cache_folder,
        description="The folder in which octavo keeps what it made, such as the converted demo model. "
        "Unset: octavo in $XDG_CACHE_HOME, or in ~/.cache.",
    )


class Settings(Model, Cache, Batching, Limits, Server, Security, Lifecycle, Logging, Files):
    """All settings; an argument that is None counts as not given. Raises `SettingsError`."""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, **given: Any) -> None:
        """`_sources`, a mapping: where arguments come from that are passed on. `_warn`: of variables without effect.

        `_read`: look at variables' former names and at the file; False where another process has done so.
        """
        passed_on, warn, read = given.pop("_sources", {}), given.pop("_warn", True), given.pop("_read", True)
        arguments = {name: value for name, value in given.items() if value is not None}
        sources = (_variables() if read else {}) | dict.fromkeys(arguments, "argument") | passed_on
        if warn:
            for sentence in without_effect(os.environ, Settings.model_fields):
                logger.warning(sentence)
        file = arguments.get("octavo_config") or os.environ.get(variable("octavo_config"))
        if read and file:
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
        self._sources = sources

    @property
    def sources(self) -> Mapping[str, str]:
        """Where each setting that is not at its default comes from."""
        return {name: source for name, source in self._sources.items() if name in self.model_fields_set}

    def tell_plugins(self) -> None:
        """Set the variables that plugins may read: they see no settings, and those may be given by a flag."""
        for name in FOR_PLUGINS:
            if (value := getattr(self, name)) is not None:
                os.environ[variable(name)] = str(value)

    def _contradictions(self, sources: Mapping[str, str]) -> Iterator[str]:
        """Settings that cannot be together, or that have no effect; defaults give way and are not looked at."""
        for lower, upper, equal, why in _ORDERED:
            if lower in sources and upper in sources:
                low, high = getattr(self, lower), getattr(self, upper)
                if low > high or (low == high and not equal):
                    limit = f"{'at most' if equal else 'below'} {upper}, which is {high} ({sources[upper]})"
                    yield f"{lower} is {low} ({sources[lower]}), it must be {limit}: {why}"
        if self.deterministic and {"max_batch_size", "max_batch_prefill_tokens"} <= sources.keys():
            rows, tokens = self.max_batch_size or 0, self.max_batch_prefill_tokens or 0
            if rows > tokens:
                yield (
                    f"max_batch_size is {rows} ({sources['max_batch_size']}), it must be at most "
                    f"max_batch_prefill_tokens, which is {tokens} ({sources['max_batch_prefill_tokens']}): a "
                    "deterministic step has no more tokens, those of requests that decode among them"
                )
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

FOR_PLUGINS = ("model_id", "otlp_endpoint", "otlp_service_name")

GROUPS = {base.group: tuple(base.model_fields) for base in Settings.__bases__ if issubclass(base, SettingsGroup)}
"""The settings by group, in the order in which people read them."""


@cache
def schemas() -> Mapping[str, values.Schema]:
    """The JSON schema of each setting: types and bounds."""
    properties: Mapping[str, values.Schema] = Settings.model_json_schema()["properties"]
    return properties


def _variables() -> dict[str, str]:
    """The variables that are set, as where a setting comes from."""
    known = {*Settings.model_fields, *FORMER_NAMES}
    return {name.lower(): f"variable {name}" for name, value in os.environ.items() if value and name.lower() in known}


def _with_current_names(arguments: Mapping[str, object], sources: dict[str, str]) -> dict[str, Any]:
    """The arguments, and what is set under a former name."""
    current = dict(arguments)
    for former, name in FORMER_NAMES.items():
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
    """Each wrong setting once: it, its value, where that came from, and what is allowed."""
    problems = {str(problem["loc"][0]): problem for problem in reversed(error.errors(include_url=False))}
    for name, problem in reversed(problems.items()):
        if problem["type"] == "extra_forbidden":
            close = difflib.get_close_matches(name, Settings.model_fields, n=1)
            told = f", did you mean {close[0]}?" if close else ""
            where = sources[name]
            yield f"there is no setting {name}{told}" + (f" ({where})" if where.startswith("in ") else "")
        elif problem["type"] == "value_error":  # of our own checks, which say it better
            yield f"{name} is {_shown(name, problem['input'])} ({sources[name]}): {problem['ctx']['error']}"
        else:
            must = values.allowed(schemas()[name])
            yield f"{name} is {_shown(name, problem['input'])} ({sources[name]}): it must be {must}"


def _shown(name: str, value: object) -> str:
    return "not shown" if name == "api_key" else repr(value)
