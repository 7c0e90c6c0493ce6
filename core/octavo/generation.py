"""One prompt on its way through the engine: its sequences, their text, and what is collected of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.engine import Engine, Output
from octavo.engine.request import FinishReason
from octavo.engine.sampler import TokenLogprobs
from octavo.engine.sampling_params import SamplingParams
from octavo.hooks import LogitsProcessor
from octavo.outputs import Completion, RequestOutput, StreamedToken, TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class RunningSequence:
    """One of a prompt's sequences, in the engine under `request_id`."""

    request_id: int
    completion: Completion
    detokenizer: IncrementalDetokenizer | None


@dataclass(slots=True, eq=False)
class Generation:
    """A prompt, submitted `best_of` (or `n`) times; the copies share the prompt's blocks through the prefix tree."""

    output: RequestOutput
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase | None
    streaming: bool
    sequences: dict[int, RunningSequence] = field(default_factory=dict)
    """Those that run, by request id."""

    def submit(self, engine: Engine, processors: Sequence[LogitsProcessor] = ()) -> None:
        """Queue its sequences. Raises RequestRefused if the engine cannot ever serve it; then none is queued."""
        seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        prompt = self.output.prompt_token_ids
        for index in range(self.params.sequences):
            request_id = engine.submit(prompt, self.params, seed=seed + (index << 64), processors=processors)
            wants_logprobs = self.params.logprobs is not None or self.params.sequences > self.params.n
            completion = Completion(index, logprobs=[] if wants_logprobs else None)
            self.output.completions.append(completion)
            self.sequences[request_id] = RunningSequence(request_id, completion, self._detokenizer())

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        """Only where text is looked at token by token: a whole answer is decoded at once."""
        if self.tokenizer is None or not (self.streaming or self.params.stop):
            return None
        return IncrementalDetokenizer(self.tokenizer, self.params, self.output.prompt_token_ids)

    def take(self, engine: Engine, output: Output) -> StreamedToken:
        """Add what a step brought one of its sequences."""
        sequence = self.sequences[output.request_id]
        completion = sequence.completion
        self.output.cached_tokens = (
            max(self.output.cached_tokens, output.cached_tokens) if completion.index == 0 else self.output.cached_tokens
        )
        self._take_prompt(output.prompt, completion)
        logprob = None
        text = ""
        if output.token_id is not None:
            completion.token_ids.append(output.token_id)
            if output.logprob is not None and completion.logprobs is not None:
                logprob = TokenLogprob(output.token_id, output.logprob, tuple(output.top))
                completion.logprobs.append(logprob)
            if sequence.detokenizer is not None:
                text = sequence.detokenizer.push([output.token_id])
        reason = output.finish_reason
        if reason is None and sequence.detokenizer is not None and sequence.detokenizer.stopped is not None:
            engine.cancel(output.request_id, FinishReason.STOP)
            reason = FinishReason.STOP
        if reason is not None:
            text += self._finish(sequence, reason, output.error)
        finished = None if reason is None else reason.value
        return StreamedToken(completion.index, output.token_id, text, logprob, finished, output.cached_tokens)

    def _take_prompt(self, logprobs: TokenLogprobs | None, completion: Completion) -> None:
        if logprobs is None or completion.index:
            return
        if self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [None]
        known = self.output.prompt_logprobs
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
        held = ""
        if sequence.detokenizer is not None:
            held = sequence.detokenizer.flush()
            if sequence.detokenizer.stopped is not None:
                completion.finish_reason = FinishReason.STOP.value
            completion.text = sequence.detokenizer.text
        elif self.tokenizer is not None:
            completion.text = _decode(self.tokenizer, completion.token_ids, self.params)
        return held

    def result(self) -> RequestOutput:
        """The `n` best of its sequences, the likeliest first when there were more."""
        completions = self.output.completions
        if self.params.sequences > self.params.n:
            completions.sort(key=lambda completion: -completion.mean_logprob)
            del completions[self.params.n :]
        if self.params.logprobs is None:
            for completion in completions:
                completion.logprobs = None
        return self.output

    def abandon(self, engine: Engine) -> None:
        """Take what still runs out of the engine."""
        for request_id in self.sequences:
            engine.cancel(request_id)


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], params: SamplingParams) -> str:
    text = tokenizer.decode(
        token_ids, skip_special_tokens=params.skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return str(text)


def run(engine: Engine, generations: Iterable[Generation]) -> Iterator[tuple[Generation, StreamedToken]]:
    """Step the engine until these generations are done; whatever happens, none of them stays in it."""
    owner = {request_id: generation for generation in generations for request_id in generation.sequences}
    pending = set(owner)
    try:
        while pending:
            for output in engine.step():
                generation = owner.get(output.request_id)
                if generation is None:
                    continue
                token = generation.take(engine, output)
                if token.finish_reason is not None:
                    pending.discard(output.request_id)
                yield generation, token
    finally:
        for generation in set(owner.values()):
            generation.abandon(engine)
