"""Registers the C++ backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.hooks import hookimpl

if TYPE_CHECKING:
    from octavo.attention.contract import AttentionBackend


@hookimpl
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    """One backend, for a CPU."""
    from octavo_cpu.backend import FlashDecodingBackend

    return [FlashDecodingBackend]
