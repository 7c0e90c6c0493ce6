"""Token ids to text as they come: only what later tokens can no longer change is shown."""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING, cast

from octavo.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of bytes that are not a character, or not one yet
_LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens
_PATIENCE = 2 * _LONGEST_CHARACTER  # tokens after which bytes that make no character are taken for just that
_CONTEXT = 6  # tokens that stay in the window before those that are new


class IncrementalDetokenizer:
    """The text of one sequence, a few tokens at a time.

    Each token costs one decode of a short window (two when the window moves), never one of the text. A window starts
    where the text was whole, and with tokens that were shown before, because some tokenizers drop a space at the start
    of what they decode. So a first word keeps the space that separates it from the prompt.

    The text is that of decoding all tokens at once, but for tokenizers that fall back to bytes: a byte that makes no
    character turns whole characters before it into replacement characters there, and those were shown already.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", params: SamplingParams, prompt_ids: Sequence[int] = ()
    ) -> None:
        """`prompt_ids`: what the text continues; only its last tokens are looked at."""
        self.stopped: str | None = None
        self.token_count = 0
        self._text_of = decoder(tokenizer)
        self._params = params
        self._stops = tuple(params.stop)
        self._shown: list[str] = []
        self._held = ""
        self._window = self._tail(prompt_ids)
        self._settled = self._decoded = self._decode(self._window)
        self._whole_at = len(self._window)
        self._waiting = 0

    @property
    def text(self) -> str:
        """All text shown so far: what `push` and `flush` returned."""
        return "".join(self._shown)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that became safe to show.

        Tokens behind the one that completes a stop string are ignored: afterwards `stopped` is that string and
        `token_count` the number of tokens up to and including that one.
        """
        if self._stops:
            return self._show("".join([self._take(int(token)) for token in token_ids if self.stopped is None]))
        self.token_count += len(token_ids)
        return self._show("".join([self._settle(int(token)) for token in token_ids]))

    def flush(self) -> str:
        """Return the text that was held back, when no token will follow."""
        if self.stopped is not None:
            return ""
        text = self._decode(self._window)
        shown = self._before_stop(_continuation(self._settled, text)) + self._held
        self._settled, self._held = text, ""
        return self._show(shown)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    def _take(self, token_id: int) -> str:
        self.token_count += 1
        return self._before_stop(self._settle(token_id))

    def _settle(self, token_id: int) -> str:
        """The text that this token settles: up to a character that is not whole yet."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text == self._decoded and self._is_skipped(token_id):
            self._window.pop()
            return ""
        self._decoded = text
        if not text.endswith(_UNFINISHED):
            new = _continuation(self._settled, text)
            self._settled, self._waiting = text, 0
            self._move_window()
            return new
        self._waiting += 1
        patient = self._waiting < _PATIENCE
        if patient:
            settled = text.rstrip(_UNFINISHED)
            if not settled.startswith(self._settled):
                return ""
        else:
            settled = text.removesuffix(_UNFINISHED)
        new = _continuation(self._settled, settled)
        self._settled = settled
        if not patient:
            self._move_window()
        return new

    def _is_skipped(self, token_id: int) -> bool:
        """Whether decoding leaves this token out, so that the window need not keep it."""
        return self._params.skip_special_tokens and self._decode([token_id]) != self._text_of([token_id], False)

    def _move_window(self) -> None:
        """Drop what lies before the last place where the text was whole, once enough tokens with text follow it."""
        if len(self._window) - self._whole_at < _CONTEXT:
            return
        text = self._decode(self._window[self._whole_at :])
        if text:
            self._window = self._window[self._whole_at :]
            self._decoded, self._settled = text, text.removesuffix(_UNFINISHED)
            self._whole_at = len(self._window)

    def _before_stop(self, new: str) -> str:
        """The part of held and new text that no stop string can claim any more."""
        text = self._held + new
        found = self._first_stop(text)
        if found is not None:
            end, start, self.stopped = found
            self._held = ""
            return text[: end if self._params.include_stop_text else start]
        self._held = text[len(text) - self._could_be_stop(text) :]
        return text[: len(text) - len(self._held)]

    def _first_stop(self, text: str) -> tuple[int, int, str] | None:
        """End, start and text of the stop string that is complete first, the longest if several end there."""
        if self.token_count < self._params.min_tokens:
            return None
        found = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found, default=None)

    def _could_be_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        ends = (text[len(text) - length :] for length in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last prompt tokens: enough for some text, from where a character starts if that can be found."""
        width = _CONTEXT
        while width < len(prompt_ids) and not self._decode(_last(prompt_ids, width)):
            width *= 2
        tails = [_last(prompt_ids, width + more) for more in range(_LONGEST_CHARACTER)]
        return next((tail for tail in tails if not self._decode(tail).startswith(_UNFINISHED)), tails[0])

    def _decode(self, token_ids: list[int]) -> str:
        return self._text_of(token_ids, self._params.skip_special_tokens)


def decoder(tokenizer: "PreTrainedTokenizerBase") -> Callable[[list[int], bool], str]:
    """Token ids, and whether special ones are left out, to text.

    What transformers does around the tokenizers library takes longer than the decoding of a few tokens itself, so it is
    left out for tokenizers that do not decode in a way of their own.
    """
    if _decodes_plainly(cast(Hashable, type(tokenizer))):
        decode: Callable[[list[int], bool], str] = tokenizer.backend_tokenizer.decode
        return decode
    return lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


@cache
def _decodes_plainly(kind: type["PreTrainedTokenizerBase"]) -> bool:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    return (
        issubclass(kind, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )


def _last(token_ids: Sequence[int], count: int) -> list[int]:
    return [int(token) for token in token_ids[max(0, len(token_ids) - count) :]]


def _continuation(before: str, text: str) -> str:
    """What `text` has behind what it shares with `before`: nearly always all of `before`."""
    if text.startswith(before):
        return text[len(before) :]
    shared = next((at for at, (old, new) in enumerate(zip(before, text, strict=False)) if old != new), len(text))
    return text[shared:]
