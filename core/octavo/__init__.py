"""octavo serves language models from a paged key-value cache, with the attention of each accelerator as a plugin.

The public names are loaded when they are first used, so that ``import octavo`` and ``octavo --help`` do not wait for
torch and transformers.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.async_engine import AsyncEngine
    from octavo.attention.contract import AttentionBackend
    from octavo.engine.sampling_params import SamplingParams
    from octavo.hooks import hookimpl
    from octavo.kv.layout import KVCacheLayout
    from octavo.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "AttentionBackend", "KVCacheLayout", "SamplingParams", "__version__", "hookimpl"]

# Caches and weights are read from end to end at every step: in huge pages that costs fewer translations and faults.
# PyTorch looks once, when it first allocates; where the system has no huge pages it does nothing.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# An OpenMP thread that has done its part spins while the others do theirs: GNU's OpenMP has it take 300,000 turns,
# milliseconds, before it sleeps. When the server takes a core for a moment one thread has none, and those that spin do
# not let it have theirs. 20,000 turns still bridge the time between two kernels. PyTorch's library reads it once.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncEngine": "octavo.async_engine",
    "SamplingParams": "octavo.engine.sampling_params",
    "AttentionBackend": "octavo.attention.contract",
    "KVCacheLayout": "octavo.kv.layout",
    "hookimpl": "octavo.hooks",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
