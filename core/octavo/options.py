"""Settings as options of the command line, and what it says of bad input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer
from rich.markup import escape

from octavo.settings import GROUPS, Settings, flag, schemas, values, variable

_ALIASES = {"host": ("--hostname",), "max_input_tokens": ("--max-input-length",), "octavo_config": ("--config",)}
"""Further flags: TGI's, and a shorter one."""
_BOOLEANS = frozenset(name for name, schema in schemas().items() if not values.word(schema))
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def setting(name: str, *flags: str, **options: Any) -> Any:
    """A setting as an option: its flag, its group, its meaning, what it may be."""
    return typer.Option(*(flags or (flag(name),)), help=escape(_help(name)), rich_help_panel=_GROUP_OF[name], **options)


def _help(name: str) -> str:
    """Behind its meaning the variable, the value that it has by itself, and what it may be if no word says that yet."""
    field, schema = Settings.model_fields[name], schemas()[name]
    value = values.default(field)
    words = values.allowed(schema).removeprefix("a whole number").removeprefix("a number").strip()
    if words.startswith(("a ", "texts ", "true ")):  # the word behind the flag says it
        words = ""
    told = variable(name) + (f": {words}" if words else "") + (f"; default {value}" if value is not None else "")
    return f"{field.description} [{told}]"


def flags_of(name: str) -> tuple[str, ...]:
    """All flags of a setting: what is switched on and off has one for each."""
    return (flag(name), f"--no{flag(name)[1:]}") if name in _BOOLEANS else (flag(name), *_ALIASES.get(name, ()))


def takes_every_setting(command: Callable[..., None]) -> None:
    """Put every setting in the place of a command's `**given`; None: not given. `Settings` checks the texts."""
    *own, _ = signature(command, eval_str=True).parameters.values()
    settings = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name))
        for names in GROUPS.values()
        for name in names
    ]
    command.__signature__ = Signature([*own, *settings])  # type: ignore[attr-defined]


def _annotation(name: str) -> Any:
    if name in _BOOLEANS:
        return Annotated[bool | None, setting(name, "/".join(flags_of(name)))]
    return Annotated[str | None, setting(name, *flags_of(name), metavar=values.word(schemas()[name]))]


def sources(given: Mapping[str, object]) -> dict[str, str]:
    """Where settings come from that a command's options of their names gave."""
    return {name: f"flag {flag(name)}" for name, value in given.items() if value is not None}


def from_flags(**given: Any) -> Settings:
    """The settings of a command, whose options have their names."""
    return Settings(_sources=sources(given), **given)


@contextmanager
def bad_input_is_told() -> Iterator[None]:
    """What the user can mend is a message and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"octavo: {error}", err=True)
        raise typer.Exit(2) from None
