"""A group of settings: a class, whose fields are the settings that people look for together."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class SettingsGroup(BaseSettings):
    """A setting belongs to the group in whose class it stands: `--help` and docs/settings.md show it there."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_ignore_empty=True, allow_inf_nan=False, protected_namespaces=()
    )

    group: ClassVar[str]
    """Its title."""


def _listed(value: object) -> object:
    """A text with commas as the list it says."""
    if not isinstance(value, str):
        return value
    return tuple(filter(None, (part.strip() for part in value.split(","))))


Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]
