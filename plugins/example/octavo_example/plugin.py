"""What octavo loads at every start: light, so what is heavy is imported when it is asked for."""

from collections.abc import Sequence

from octavo import AttentionBackend, hookimpl


@hookimpl
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    """The backends that this distribution adds."""
    from octavo_example.backend import ExampleBackend

    return [ExampleBackend]
