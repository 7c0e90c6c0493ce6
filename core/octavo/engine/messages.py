"""What crosses the boundary between the engine's process and its client: msgpack of these structs, nothing else.

Nothing that arrives can run code, and what does not decode is told and dropped. Whoever asks numbers its question with
a ticket; the answer bears the same one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.hooks import StepStats

# To the engine


class Start(msgspec.Struct, tag="start"):
    """The first message: settings that are not at their defaults, by name."""

    settings: dict[str, Any]
    sources: dict[str, str] = {}
    """Where they come from."""


class Submit(msgspec.Struct, tag="submit"):
    """One prompt, to be answered `best_of` (or `n`) times: Accepted or Refused comes back."""

    ticket: int
    prompt: bytes
    """Token ids, int64 little endian."""
    params: msgspec.Raw
    """SamplingParams: decoded by itself, so that a refusal can name the ticket."""
    tenant: str = ""
    cache_salt: str = ""
    label: str = ""
    """Its user's name for it."""
    trace: str = ""
    """A W3C `traceparent`, or nothing."""


class Cancel(msgspec.Struct, tag="cancel"):
    """Forget a sequence; one that has ended is passed over."""

    sequence: int
    reason: str


class AskStats(msgspec.Struct, tag="ask_stats"):
    """EngineStats comes back."""

    ticket: int


class AskSnapshot(msgspec.Struct, tag="ask_snapshot"):
    """CacheSnapshot comes back."""

    ticket: int
    most: int
    """Nodes, and requests."""


class Stop(msgspec.Struct, tag="stop"):
    """End after this."""


ToEngine = Start | Submit | Cancel | AskStats | AskSnapshot | Stop


# From the engine


class EngineInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What the engine serves, and how."""

    model: str
    """As the settings name it; "demo" for the demo model."""
    revision: str | None
    version: str
    """Of octavo."""
    dtype: str
    device: str
    backend: str
    """`platform/name`, or one for each phase."""
    selection: dict[str, Any]
    """How the backend came to be chosen: every candidate with its reasons, and what is switched off."""
    block_size: int
    """Tokens in a block."""
    num_blocks: int
    """Usable ones, block 0 not among them."""
    block_bytes: int
    weight_bytes: int
    workspace_bytes: int
    """What attention backends keep from the start."""
    activation_bytes: int
    """Of one step at most: measured at the start."""
    graph_bytes: int
    cache_bytes: int
    """Of all blocks, block 0 among them."""
    prefix_caching: bool
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int
    """Tokens that the cache holds."""
    max_batch_size: int | None
    vocab_size: int
    eos_token_ids: list[int]
    process_id: int


class Tokenizer(msgspec.Struct, frozen=True):
    """How the model's tokenizer is read."""

    location: str
    """A folder, or a name on the hub."""
    kind: str
    """The name of a class of transformers."""


class Loaded(msgspec.Struct, tag="loaded"):
    """The model is in memory and its engine is being made; who needs the tokenizer can read it meanwhile."""

    tokenizer: Tokenizer | None
    """None: the model has none."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded, the engine waits for requests."""

    info: EngineInfo


class Failed(msgspec.Struct, tag="failed"):
    """The process ends, and why."""

    reason: str


class Accepted(msgspec.Struct, tag="accepted"):
    """The prompt's sequences are queued under these numbers, which outputs bear."""

    ticket: int
    sequences: list[int]


class Began(msgspec.Struct, tag="began"):
    """A step begins that is the first to run these sequences. Told where the settings limit the time before it."""

    sequences: list[int]


class Refused(msgspec.Struct, tag="refused"):
    """The prompt can never be served, and why; nothing of it is queued."""

    ticket: int
    reason: str


class Invalid(msgspec.Struct, tag="invalid"):
    """A message was no message."""

    reason: str


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Of the next prompt positions."""

    logprobs: list[float]
    top_token_ids: list[list[int]]
    top_logprobs: list[list[float]]


class Details(msgspec.Struct, array_like=True):
    """What only some outputs have."""

    logprob: float | None = None
    top: list[tuple[int, float]] = []
    prompt: PromptLogprobs | None = None
    finish_reason: str | None = None
    error: str | None = None


class Outputs(msgspec.Struct, tag="outputs"):
    """What one step brought all of its sequences, in columns: one message a step costs less than one a token."""

    step: StepStats
    sequences: list[int]
    tokens: list[int]
    """-1: none."""
    cached_tokens: list[int]
    queue_seconds: list[float]
    details: dict[int, Details]
    """By place in `sequences`."""


class EngineStats(msgspec.Struct, tag="stats", kw_only=True):
    """Numbers now, and counters since the process started."""

    ticket: int = 0
    blocks_total: int = 0
    """Usable blocks: free + cached + held."""
    blocks_free: int = 0
    blocks_cached: int = 0
    """Of prefixes that nobody uses: they can be evicted."""
    blocks_held: int = 0
    """In use by requests, shared ones counted once."""
    blocks_pinned: int = 0
    """Those of `blocks_held` that the prefix tree owns."""
    running: int = 0
    waiting: int = 0
    evicted_blocks: int = 0
    hit_tokens: int = 0
    """Prompt tokens found in the cache ..."""
    queried_tokens: int = 0
    """... of so many looked up."""
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    """Of all steps together."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    decode_tokens: int = 0
    last_step: StepStats | None = None


class CacheNode(msgspec.Struct, array_like=True):
    """A run of tokens in the prefix tree."""

    parent: int
    """Its place in the list; -1: none above it is shown."""
    tokens: int
    blocks: int
    locks: int
    """Requests that use it, or a node below it."""
    idle_seconds: float
    """Since it was last in use; 0 while it is."""
    first_tokens: list[int]
    """To show what it begins with."""
    tenant: str
    adapter: str


class ActiveRequest(msgspec.Struct, array_like=True):
    """A sequence that runs or waits."""

    id: int
    running: bool
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt: found in the cache when it was first let in."""
    computed_tokens: int
    tokens: int
    """Of prompt and answer, so far."""
    most_tokens: int
    blocks: int
    """Shared ones too."""
    node: int
    """Place of the node in which its shared blocks end: they are that node's, and those of all above it; -1: none."""
    seconds: float
    """Since it was submitted."""
    last_tokens: list[int]
    """To show how far it is."""
    tenant: str


class CacheSnapshot(msgspec.Struct, tag="snapshot", kw_only=True):
    """Every block, the prefix tree and who uses it, as they stand."""

    ticket: int
    stats: EngineStats
    """At the same moment."""
    states: bytes
    """A byte for each block, block 0 included: its place in BLOCK_STATES."""
    idle_seconds: bytes
    """Of each block, float32 little endian: since a cached one was last in use; 0 for others."""
    owners: bytes
    """Of each block, int32 little endian: its place in `nodes`; -2 - its place in `requests`; -1: in neither."""
    nodes: list[CacheNode]
    """Those used last, parents before their children."""
    nodes_left_out: int
    requests: list[ActiveRequest]
    """Those that run, then those that wait, in the order of arrival."""
    seconds: float
    """Of a processor, to make this; the engine computed nothing meanwhile."""


BLOCK_STATES = ("scratch", "free", "cached", "pinned", "held")
"""cached: in the tree, unused. pinned: in the tree and used by requests. held: one request's alone."""

FromEngine = Loaded | Ready | Failed | Accepted | Began | Refused | Invalid | Outputs | EngineStats | CacheSnapshot

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
