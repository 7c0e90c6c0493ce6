"""What a plugin can add to octavo: the hooks, each documented where it is specified.

A plugin is a module, or any object, whose functions bear a hook's name and the mark `octavo.hookimpl`, and which its
distribution names in the entry-point group `octavo`:

    [project.entry-points.octavo]
    mychip = "octavo_mychip.plugin"

A function may take fewer arguments than its hook gives, under the same names. Import what is heavy inside it. Each hook
is a promise for years: there are no more than are needed.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import pluggy

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.attention.contract import AttentionBackend, AttentionSpec
    from octavo.attention.device import Device

PROJECT: Final = "octavo"
"""The name of the marks, and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class LogitsProcessor(Protocol):
    """Changes the logits of one sequence before its next token is chosen."""

    def __call__(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
        """The logits to use from those given, [vocabulary] float32, which may be changed in place.

        `output_ids` are the tokens generated so far, not to be changed.
        """
        ...


class GrammarRefused(ValueError):
    """A request's grammar cannot be enforced, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one step did, and how things stood after it."""

    seconds: float
    """From scheduling to sampled tokens."""
    prefill_tokens: int
    """Prompt tokens computed."""
    decode_tokens: int
    """Rows that decoded."""
    running: int
    """Requests that hold blocks."""
    waiting: int
    preempted: int
    """Requests that lost their blocks in this step."""
    free_blocks: int
    cached_blocks: int
    """Held by the prefix tree alone: they can be evicted."""
    held_blocks: int
    """In use by running requests."""
    evicted_blocks: int = 0
    """Taken from the prefix tree in this step, for requests that needed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """What became of one request: of one sequence, where a prompt is to be answered several times."""

    request_id: int
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt: read from the cache, not computed."""
    generated_tokens: int
    preemptions: int
    first_token_seconds: float | None
    """From submission to the first token; None when there was none."""
    seconds: float
    """From submission to the end."""
    queue_seconds: float | None = None
    """From submission to the first admission; None when it was never let in."""
    sequences: int = 1
    """Of its prompt, this one among them: `n` or `best_of`."""
    label: str = ""
    """Its user's name for it: the server's `x-request-id`."""
    trace: str = ""
    """The trace that it belongs to, as the header `traceparent` says it (W3C Trace Context); empty for none."""


@hookspec
def octavo_attention_backends() -> Sequence[type[AttentionBackend]]:
    """Attention backends to choose from: classes, not objects.

    Called once. Each must be a concrete subclass of `octavo.AttentionBackend` that states `name`, `platform`,
    `contract`, `capabilities` and `layout_type`; `platform/name` must be no one else's. Whether one can run on this
    machine is for its `probe` to say: return it in any case, so that `octavo backends` can show why not.
    """
    return ()


@hookspec
def octavo_devices() -> Sequence[type[Device]]:
    """Kinds of device beyond those that come with octavo: concrete subclasses of `octavo.attention.device.Device`.

    Called once. A device's `name` is its word in `DEVICE` and must be no one else's.
    """
    return ()


@hookspec(firstresult=True)
def octavo_rank_backends(spec: AttentionSpec, device: Device, names: Sequence[str]) -> Sequence[str] | None:
    """The order in which to prefer backends when the user asks for none; None leaves it to others.

    `names` are those that can serve the model on `device`, as `platform/name`, highest priority first; `spec` is the
    model's group with the most layers. The first of the returned names is chosen. Naming a backend whose priority is
    negative counts as asking for it. The first plugin that answers decides.
    """
    return None


@hookspec
def octavo_logits_processors(params: Any, tokenizer: Any, end_ids: Set[int]) -> LogitsProcessor | None:
    """A processor for one new sequence, or None to leave it alone. Those of all plugins are applied one after another.

    `params`: the request's `octavo.SamplingParams`; `tokenizer`: the model's, as transformers loads it, None if it has
    none; `end_ids`: the model's own end-of-sequence tokens. Called once for each of a request's sequences.

    A processor that makes the sequence obey `params.grammar` says so with an attribute `grammar` that equals it; a
    request whose grammar no processor enforces is refused. Raise GrammarRefused where it cannot be. The server asks for
    processors too, to check grammars before they reach the engine, and there without a tokenizer and end tokens: its
    process has not imported torch, and need not for that.
    It may be called in any thread, and is once when an engine's process starts: the first request finds all ready.
    """
    return None


@hookspec
def octavo_step_finished(step: StepStats) -> None:
    """Called after every step, between two of them: be quick. An observer that raises is not called again."""


@hookspec
def octavo_request_finished(request: RequestSummary) -> None:
    """Called when a request has ended, whatever the reason. An observer that raises is not called again."""


HOOKS: Final = tuple(name for name in dict(globals()) if name.startswith("octavo_"))
"""The names of all hooks."""
