"""Settings as options of the command line, and what it says of bad input."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter
from typing import Annotated, Any, get_args

import typer

from octavo.settings import Settings, flag, variable

_ALIASES = {"host": ("--hostname",), "max_input_tokens": ("--max-input-length",), "octavo_config": ("--config",)}
"""Further flags: TGI's, and a shorter one."""


def setting(name: str, *flags: str, **options: Any) -> Any:
    """A setting as an option: its flag and its meaning."""
    help = f"{Settings.model_fields[name].description} [{variable(name)}]"
    return typer.Option(*(flags or (flag(name),)), help=help, **options)


def every_setting(*left_out: str) -> list[Parameter]:
    """All settings as a command's keyword parameters; what is not given is None. `Settings` checks the texts."""
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name))
        for name in Settings.model_fields
        if name not in left_out
    ]


def _annotation(name: str) -> Any:
    kind = Settings.model_fields[name].annotation
    if kind is bool or bool in get_args(kind):
        return Annotated[bool | None, setting(name, f"{flag(name)}/--no{flag(name)[1:]}")]
    word = "NUMBER" if re.search(r"\b(int|float)\b", str(kind)) else "TEXT"
    flags = (flag(name), *_ALIASES.get(name, ()))
    return Annotated[str | None, setting(name, *flags, metavar=word)]


@contextmanager
def bad_input_is_told() -> Iterator[None]:
    """What the user can mend is a message and exit status 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"octavo: {error}", err=True)
        raise typer.Exit(2) from None
