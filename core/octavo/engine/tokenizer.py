"""The tokenizer on the client's side of the engine's process, read while the engine is being made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from octavo.engine import messages
from octavo.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def read_tokenizer(loaded: Awaitable[messages.Loaded], settings: Settings) -> PreTrainedTokenizerBase | None:
    """The model's, as the process that has loaded it says; None if it has none. Raises OSError or ValueError."""
    read = await asyncio.to_thread(_reader)
    found = (await loaded).tokenizer
    if found is None:
        return None
    options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    return await asyncio.to_thread(read, found.location, found.kind, **options)


def _reader() -> Callable[..., PreTrainedTokenizerBase]:
    """transformers takes a second to import, many on a cold disk: not before the process starts, but beside it."""
    from octavo.models.tokenizer import read

    return read
