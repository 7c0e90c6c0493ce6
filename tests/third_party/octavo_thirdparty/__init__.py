"""An attention backend for octavo in a distribution of its own."""

from collections.abc import Sequence

from octavo import AttentionBackend, hookimpl


@hookimpl
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    from .rowwise import Rowwise

    return [Rowwise]
