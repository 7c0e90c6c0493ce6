"""A tokenizer alone, without torch: what a process needs that computes nothing.

AutoTokenizer finds the class by way of the model's configuration, and transformers' configurations import torch. The
classes that it finds do not: whoever has loaded the model says which it was.
"""

from typing import Any, Final

import transformers
from transformers import PreTrainedTokenizerBase

from octavo.models.quiet import quiet

_ANY: Final = "AutoTokenizer"


def kind_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name by which `read` finds its class: one of transformers' own, or what finds code beside a checkpoint."""
    kind = type(tokenizer)
    return kind.__name__ if getattr(transformers, kind.__name__, None) is kind else _ANY


def read(location: str, kind: str, *, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of a name on the hub, as this kind; torch is imported only to run code beside it.

    Raises OSError or ValueError for files that cannot be had or read.
    """
    options = {"trust_remote_code": trust_remote_code} if kind == _ANY else {}
    loader: Any = getattr(transformers, kind)
    with quiet(progress=False):
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(location, revision=revision, **options)
    return tokenizer
