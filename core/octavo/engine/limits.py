"""What a step may hold, and a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The scheduler's knobs, with TGI's names and meaning."""

    max_input_tokens: int
    """The longest prompt."""
    max_total_tokens: int
    """The longest prompt and answer together."""
    max_batch_prefill_tokens: int
    """Prompt tokens computed in one step, all requests together: longer prompts are computed in chunks."""
    max_batch_size: int | None = None
    """Requests that run at once; None: as many as the cache holds."""
    counts_decodes: bool = False
    """`max_batch_prefill_tokens` counts the tokens of requests that decode too: no step has more tokens in all. Then
    `max_batch_size` is no greater."""
    waiting_served_ratio: float | None = None
    """While requests decode, newcomers wait until they are this fraction (rounded down) of them; None: never."""
    max_waiting_tokens: int | None = None
    """But no longer than it takes those that run to get this many tokens each; None: without end."""
    whole_prompts: bool = False
    """The attention backend cannot start behind older keys: a prompt is computed in one step or not yet."""
    spare_slots: int = 0
    """Slots that the attention backend wants beyond a request's tokens."""
