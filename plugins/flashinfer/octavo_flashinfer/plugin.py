"""Registers FlashInfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.hooks import hookimpl

if TYPE_CHECKING:
    from octavo.attention.contract import AttentionBackend


@hookimpl
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    """Without FlashInfer or a GPU it says so when it is asked."""
    from octavo_flashinfer.backend import FlashInferBackend

    return [FlashInferBackend]
