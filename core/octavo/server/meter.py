"""How long each part of a request took, and how many tokens it had."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Meter:
    """One request's times, seconds of a clock that only goes forward, and counts, of all its sequences together."""

    characters: int = 0
    """Of the prompt, where it is text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    max_new_tokens: int | None = None
    queue: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    _submitted: float | None = None
    _first: float | None = None
    _ended: float | None = None

    def submit(self) -> None:
        """The checks are over: the engine has it."""
        self._submitted = time.perf_counter()

    def token(self) -> None:
        """A token has come."""
        self.generated_tokens += 1
        if self._first is None:
            self._first = time.perf_counter()

    def end(self) -> None:
        """The last token has come."""
        if self._ended is None:
            self._ended = time.perf_counter()

    @property
    def total(self) -> float:
        """From arrival to the end, or to now."""
        return (self._ended or time.perf_counter()) - self.started

    @property
    def validation(self) -> float:
        """From arrival to submission."""
        return (self._submitted or time.perf_counter()) - self.started

    @property
    def inference(self) -> float:
        """From the queue's end to the last token."""
        return max(0.0, self.total - self.validation - self.queue)

    @property
    def per_token(self) -> float:
        """Inference seconds for each token."""
        return self.inference / max(1, self.generated_tokens)

    @property
    def first_token(self) -> float:
        """From arrival to the first token."""
        return (self._first or time.perf_counter()) - self.started

    @property
    def per_output_token(self) -> float | None:
        """Between tokens, the first left out; None where there is one alone."""
        if self.generated_tokens < 2:
            return None
        return (self.total - self.first_token) / (self.generated_tokens - 1)

    def seconds(self) -> dict[str, float]:
        """The times that have been measured, by name."""
        found = {"validation_seconds": self.validation} if self._submitted else {}
        if self._first:
            found |= {"queue_seconds": self.queue, "first_token_seconds": self.first_token}
        return {name: round(seconds, 6) for name, seconds in found.items()}

    def headers(self, compute_type: str) -> dict[str, str]:
        """TGI's headers: times in milliseconds, with their decimals."""
        milliseconds = {
            "x-total-time": self.total,
            "x-validation-time": self.validation,
            "x-queue-time": self.queue,
            "x-inference-time": self.inference,
            "x-time-per-token": self.per_token,
        }
        return {
            "x-compute-type": compute_type,
            "x-compute-time": f"{self.total:.6f}",
            "x-compute-characters": str(self.characters),
            "x-prompt-tokens": str(self.prompt_tokens),
            "x-cached-tokens": str(self.cached_tokens),
            "x-generated-tokens": str(self.generated_tokens),
            **{name: f"{1000 * seconds:.3f}" for name, seconds in milliseconds.items()},
        }
