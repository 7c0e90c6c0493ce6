"""One prompt on its way through the engine: its sequences, their text, and what is collected of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.output import Output
from octavo.engine.request import FinishReason
from octavo.engine.sampled import TokenLogprobs
from octavo.engine.sampling_params import SamplingParams
from octavo.hooks import LogitsProcessor
from octavo.outputs import Completion, RequestOutput, StreamedToken, TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from octavo.engine.engine import Engine


class Canceller(Protocol):
    """An engine, here or in another process, as far as those need it who read from it."""

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Forget a request, if it still runs."""


@dataclass(slots=True)
class RunningSequence:
    """One of a prompt's sequences, in the engine under `request_id`."""

    request_id: int
    completion: Completion
    detokenizer: IncrementalDetokenizer | None
    waiting: list[int] = field(default_factory=list)
    """Tokens whose text nobody has asked for yet."""


@dataclass(slots=True, eq=False)
class Generation:
    """A prompt, submitted `best_of` (or `n`) times, and what comes of it."""

    output: RequestOutput
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase | None
    streaming: bool
    sequences: dict[int, RunningSequence] = field(default_factory=dict)
    """Those that run, by request id."""
    arrived: deque[StreamedToken] = field(default_factory=deque)
    """Tokens that nobody has taken yet."""

    def begin(self, request_ids: Iterable[int]) -> None:
        """Its sequences are in the engine under these ids."""
        wants_logprobs = self.params.logprobs is not None or self.params.sequences > self.params.n
        if self.params.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]
        for index, request_id in enumerate(request_ids):
            completion = Completion(index, logprobs=[] if wants_logprobs else None)
            self.output.completions.append(completion)
            self.sequences[request_id] = RunningSequence(request_id, completion, self._detokenizer())

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        if self.tokenizer is None:
            return None
        return IncrementalDetokenizer(self.tokenizer, self.params, self.output.prompt_token_ids)

    def take(self, engine: Canceller, output: Output) -> None:
        """Add what a step brought one of its sequences."""
        sequence = self.sequences[output.request_id]
        completion = sequence.completion
        if completion.index == 0:
            self.output.cached_tokens = output.cached_tokens
            self._take_prompt(output.prompt)
        logprob = self._take_token(sequence, output)
        text = self._text(sequence)
        reason = output.finish_reason
        if reason is None and sequence.detokenizer is not None and sequence.detokenizer.stopped is not None:
            engine.cancel(output.request_id, FinishReason.STOP)
            reason = FinishReason.STOP
        if reason is not None:
            text += self._finish(sequence, reason, output.error)
        if output.token_id is not None or reason is not None:
            self.arrived.append(
                StreamedToken(
                    completion.index,
                    output.token_id,
                    text,
                    logprob,
                    completion.finish_reason,
                    output.cached_tokens,
                    completion.error,
                )
            )

    def abandon(self, engine: Canceller, index: int | None = None) -> list[int]:
        """Take what still runs of it out of the engine, or the sequence `index` alone; returns their request ids."""
        ids = [number for number, one in self.sequences.items() if index in (None, one.completion.index)]
        for number in ids:
            engine.cancel(number)
            self.sequences.pop(number).completion.finish_reason = FinishReason.CANCELLED.value
        return ids

    def take_arrived(self) -> list[StreamedToken]:
        """The tokens that nobody has taken yet."""
        tokens = list(self.arrived)
        self.arrived.clear()
        return tokens

    def _take_token(self, sequence: RunningSequence, output: Output) -> TokenLogprob | None:
        if output.token_id is None:
            return None
        completion = sequence.completion
        completion.token_ids.append(output.token_id)
        sequence.waiting.append(output.token_id)
        if output.logprob is None or completion.logprobs is None:
            return None
        logprob = TokenLogprob(output.token_id, output.logprob, tuple(output.top))
        completion.logprobs.append(logprob)
        return logprob

    def _text(self, sequence: RunningSequence, ended: bool = False) -> str:
        """The text that can be shown now; worked out at the end where nobody looks at it before."""
        if sequence.detokenizer is None or not (self.streaming or self.params.stop or ended):
            return ""
        tokens, sequence.waiting = sequence.waiting, []
        return sequence.detokenizer.push(tokens)

    def _take_prompt(self, logprobs: TokenLogprobs | None) -> None:
        known = self.output.prompt_logprobs
        if logprobs is None or known is None:
            return
        following = self.output.prompt_token_ids[len(known) : len(known) + len(logprobs.logprobs)]
        for token, logprob, ids, values in zip(
            following,
            logprobs.logprobs.tolist(),
            logprobs.top_token_ids.tolist(),
            logprobs.top_logprobs.tolist(),
            strict=True,
        ):
            known.append(TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True))))

    def _finish(self, sequence: RunningSequence, reason: FinishReason, error: str | None) -> str:
        """Settle its text; returns what had been held back."""
        completion = sequence.completion
        completion.finish_reason, completion.error = reason.value, error
        del self.sequences[sequence.request_id]
        if sequence.detokenizer is None:
            return ""
        held = self._text(sequence, ended=True) + sequence.detokenizer.flush()
        if sequence.detokenizer.stopped is not None and error is None:
            completion.finish_reason = FinishReason.STOP.value
        completion.text = sequence.detokenizer.text
        return held

    def result(self) -> RequestOutput:
        """The `n` best of its sequences, the likeliest first when there were more; those that failed come last."""
        completions = self.output.completions
        if self.params.sequences > self.params.n:
            completions.sort(key=lambda completion: (completion.error is not None, -completion.mean_logprob))
            del completions[self.params.n :]
        if self.params.logprobs is None:
            for completion in completions:
                completion.logprobs = None
        return self.output


@dataclass(slots=True)
class Session:
    """Everybody who waits for the engine in this process, from any thread: whoever steps it delivers to all."""

    engine: Engine
    owners: dict[int, Generation] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by whoever touches the engine or a generation."""

    def submit(self, generation: Generation, processors: Sequence[Sequence[LogitsProcessor]] = ()) -> None:
        """Queue a prompt. Raises RequestRefused if the engine can never serve it; then nothing of it is queued."""
        with self.lock:
            ids = self.engine.submit_all(generation.output.prompt_token_ids, generation.params, processors=processors)
            generation.begin(ids)
            self.owners |= dict.fromkeys(generation.sequences, generation)

    def next(self, generation: Generation) -> StreamedToken | None:
        """Its next token, stepping the engine as long as there is none; None when all its sequences have ended."""
        while True:
            with self.lock:
                if generation.arrived:
                    return generation.arrived.popleft()
                if not generation.sequences:
                    return None
                self._step()

    def advance(self, generations: Sequence[Generation]) -> list[StreamedToken] | None:
        """What came for them since, after one more step if they wait for one; None when all of them have ended."""
        with self.lock:
            running = any(generation.sequences for generation in generations)
            if running:
                self._step()
            arrived = [token for generation in generations for token in generation.take_arrived()]
        return arrived if running or arrived else None

    def _step(self) -> None:
        outputs = self.engine.step()
        self.engine.take_stats()  # nobody here wants them; plugins were told
        if not outputs and not self.engine.scheduler.running:
            raise RuntimeError("the engine has nothing to run, and requests that wait for it: please report this")
        for output in outputs:
            generation = self.owners.get(output.request_id)
            if generation is None:  # its last token ended it with a stop text, in the step that failed
                continue
            generation.take(self.engine, output)
            if output.request_id not in generation.sequences:
                del self.owners[output.request_id]

    def abandon(self, generation: Generation) -> None:
        """Take what still runs of it out of the engine; its blocks are free at once."""
        with self.lock:
            for request_id in generation.abandon(self.engine):
                self.owners.pop(request_id, None)
            self.engine.settle()


class TokenStream(Iterator[StreamedToken]):
    """Tokens of one prompt as they come. Closed, left or forgotten, it takes what still runs out of the engine."""

    def __init__(self, session: Session, generation: Generation) -> None:
        self._session = session
        self._generation = generation

    def __next__(self) -> StreamedToken:
        try:
            token = self._session.next(self._generation)
        except BaseException:
            self.close()
            raise
        if token is None:
            raise StopIteration
        return token

    def close(self) -> None:
        """Cancel what still runs; nothing more comes."""
        self._session.abandon(self._generation)
        self._generation.arrived.clear()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
