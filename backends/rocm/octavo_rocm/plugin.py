"""Registers the ROCm backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.hooks import hookimpl

if TYPE_CHECKING:
    from octavo.attention.contract import AttentionBackend


@hookimpl
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    """Two layouts; without Triton or an AMD GPU they say so when they are asked."""
    from octavo_rocm.backend import FlashDecodingBackend, PagedBackend

    return [FlashDecodingBackend, PagedBackend]
