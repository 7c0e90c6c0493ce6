"""Registers the backends of Intel's extension for PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.hooks import hookimpl

if TYPE_CHECKING:
    from octavo.attention.contract import AttentionBackend


@hookimpl
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    """Two block sizes on CPUs, and two on Intel's GPUs; without the library they say so when they are asked."""
    from octavo_ipex import backend, xpu

    return [backend.FlashDecodingBackend, backend.PagedBackend, xpu.FlashDecodingBackend, xpu.PagedBackend]
