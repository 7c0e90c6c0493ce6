"""octavo in one object: a model, its cache, and text in and out."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.engine.build import open_engine
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler import RequestRefused
from octavo.generation import Generation, Session, TokenStream
from octavo.outputs import RequestOutput
from octavo.plugins import Plugins
from octavo.plugins import plugins as installed_plugins
from octavo.settings import Settings

Prompt = str | Sequence[int]
"""A text, or token ids."""
Prompts = Prompt | Sequence[Prompt]


class LLM:
    """Serves one model in this process. Threads may share it: their requests run in the same batches."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        attention: str | None = None,
        dtype: str | None = None,
        block_size: int | None = None,
        max_batch_total_tokens: int | None = None,
        prefix_caching: bool | None = None,
        progress: bool = True,
        plugins: Plugins | None = None,
        **settings: Any,
    ) -> None:
        """Load a model: a folder with a checkpoint, a GGUF file, a hub name; None or "demo": the demo model.

        The other arguments are settings by their names; what is not given is read from its variable (see `Settings`).
        Raises SettingsError, UnsupportedModel, BackendUnavailable or UnknownBackend, each with its reasons.
        """
        self.settings = Settings(
            model_id=None if model is None else str(model), attention=attention, dtype=dtype, block_size=block_size,
            max_batch_total_tokens=max_batch_total_tokens, prefix_caching=prefix_caching, **settings,
        )  # fmt: skip
        self.plugins = plugins or installed_plugins()
        loaded, built = open_engine(self.settings, self.plugins, progress=progress and sys.stderr.isatty())
        self.tokenizer = loaded.tokenizer
        self.engine, self.selection = built.engine, built.selection
        self._session = Session(self.engine)

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, texts or lists of token ids, and return the results in their order.

        `params`: one for all prompts, or one for each. Raises RequestRefused, naming the prompt, before anything runs
        if one of them can never be served; a step that fails ends its requests with finish_reason "error".
        """
        generations = self._generations(prompts, params, streaming=False)
        total = sum(len(generation.sequences) for generation in generations)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
        )
        with Progress(*columns, console=Console(stderr=True), disable=not progress, transient=True) as bar:
            task = bar.add_task("generating", total=total, tokens=0)
            tokens = 0
            try:
                while (arrived := self._session.advance(generations)) is not None:
                    if progress:
                        tokens += len(arrived)
                        ended = sum(token.finish_reason is not None for token in arrived)
                        bar.update(task, advance=ended, tokens=tokens)
            finally:
                self._abandon(generations)
        return [generation.result() for generation in generations]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """Answer one prompt and give its tokens as they come; several streams may be read in turns.

        Closing the stream cancels what still runs. Raises RequestRefused at once if it can never be served, and
        ValueError for best_of > n: it needs all.
        """
        if params is not None and params.sequences > params.n:
            raise ValueError(
                f"best_of={params.best_of} with n={params.n} cannot be streamed: use generate, or leave best_of out"
            )
        (generation,) = self._generations([prompt], [params or SamplingParams()], streaming=True)
        return TokenStream(self._session, generation)

    def _generations(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None, streaming: bool
    ) -> list[Generation]:
        listed = _listed(prompts)
        each = [params or SamplingParams()] * len(listed) if isinstance(params, SamplingParams | None) else list(params)
        if len(each) != len(listed):
            raise ValueError(
                f"{len(listed)} prompts and {len(each)} sampling parameters: give one for all, or one for each"
            )
        generations: list[Generation] = []
        try:
            for number, (prompt, wanted) in enumerate(zip(listed, each, strict=True)):
                try:
                    generation = self._generation(prompt, wanted, streaming)
                    generations.append(generation)
                    self._session.submit(generation, self.engine.logits_processors(wanted, self.tokenizer))
                except ValueError as error:
                    raise RequestRefused(f"prompt {number}: {error}") from None
        except BaseException:
            self._abandon(generations)
            raise
        return generations

    def _abandon(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self._session.abandon(generation)

    def _generation(self, prompt: object, params: object, streaming: bool) -> Generation:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{params!r} are no sampling parameters: give SamplingParams(...)")
        if isinstance(prompt, str):
            output = RequestOutput(prompt, self.encode(prompt), [])
        else:
            output = RequestOutput(None, _token_ids(prompt), [])
        return Generation(output, params, self.tokenizer, streaming)

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt. Raises ValueError where the model has no tokenizer."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: give the prompt as token ids")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of the prompt is half of a surrogate pair: {error.reason}"
            ) from None
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids


def _listed(prompts: object) -> list[object]:
    """One prompt or several, as a list of prompts that are still to be looked at."""
    if isinstance(prompts, str | bytes | Mapping | Set) or not isinstance(prompts, Iterable):
        return [prompts]
    several = list(prompts)
    return [several] if several and isinstance(several[0], Integral) else several


def _token_ids(prompt: object) -> list[int]:
    """A prompt that is no text. Raises ValueError unless it is a list of whole numbers."""
    numbers = (
        None if isinstance(prompt, str | bytes | Mapping | Set) or not isinstance(prompt, Iterable) else list(prompt)
    )
    if numbers is None or any(isinstance(number, bool) or not isinstance(number, Integral) for number in numbers):
        raise ValueError(f"{prompt!r} is neither a text nor a list of token ids")
    return [int(number) for number in numbers]
