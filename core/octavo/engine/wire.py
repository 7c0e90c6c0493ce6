"""Outputs, prompts and requests as they cross the boundary, both ways."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.engine import messages
from octavo.engine.output import Output
from octavo.engine.request import FinishReason
from octavo.engine.sampled import TokenLogprobs
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import RequestRefused
from octavo.hooks import StepStats


def pack(step: StepStats, outputs: Sequence[Output]) -> messages.Outputs:
    """What a step brought, as one message."""
    return messages.Outputs(
        step=step,
        sequences=[output.request_id for output in outputs],
        tokens=[-1 if output.token_id is None else output.token_id for output in outputs],
        cached_tokens=[output.cached_tokens for output in outputs],
        queue_seconds=[output.queue_seconds for output in outputs],
        details={place: _details(output) for place, output in enumerate(outputs) if _has_details(output)},
    )


def unpack(message: messages.Outputs) -> Iterator[Output]:
    """The outputs of a message."""
    columns = zip(message.sequences, message.tokens, message.cached_tokens, message.queue_seconds, strict=True)
    for place, (sequence, token, cached, queued) in enumerate(columns):
        output = Output(sequence, None if token < 0 else token, cached_tokens=cached, queue_seconds=queued)
        if (details := message.details.get(place)) is not None:
            _add(output, details)
        yield output


def _has_details(output: Output) -> bool:
    return output.finish_reason is not None or output.logprob is not None or output.prompt is not None


def _details(output: Output) -> messages.Details:
    details = messages.Details(output.logprob, output.top, None, output.finish_reason, output.error)
    if (prompt := output.prompt) is not None:
        columns = (prompt.logprobs.tolist(), prompt.top_token_ids.tolist(), prompt.top_logprobs.tolist())
        details.prompt = messages.PromptLogprobs(*columns)
    return details


def _add(output: Output, details: messages.Details) -> None:
    output.logprob, output.top, output.error = details.logprob, details.top, details.error
    output.finish_reason = None if details.finish_reason is None else FinishReason(details.finish_reason)
    if details.prompt is not None:
        output.prompt = TokenLogprobs(
            np.array(details.prompt.logprobs, np.float32),
            np.array(details.prompt.top_token_ids, np.int64),
            np.array(details.prompt.top_logprobs, np.float32),
        )


def prompt_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as int64, little endian. Raises RequestRefused for what is no list of whole numbers."""
    try:
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu") or tokens.dtype == np.uint64:
            raise TypeError(f"{tokens.ndim} dimensions of {tokens.dtype}")
        return tokens.astype("<i8").tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestRefused(f"the prompt is no list of token ids: {error}") from None


def prompt_tokens(data: bytes) -> NDArray[np.int64]:
    """Back from bytes, a view. Raises ValueError unless they are whole numbers of 8 bytes."""
    return np.frombuffer(data, "<i8")


def fingerprint(prompt: bytes, params: SamplingParams, tenant: str) -> bytes:
    """The same for a request that comes again; only its seed may have been drawn anew."""
    unseeded = params if params.seed is None else msgspec.structs.replace(params, seed=None)
    alike = msgspec.msgpack.encode((prompt, unseeded, tenant))
    return hashlib.blake2b(alike, digest_size=16).digest()
