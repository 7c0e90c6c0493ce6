"""Text that comes token by token against the tokenizer's own decoding of all tokens at once."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from octavo.engine import detokenizer as detokenizing
from octavo.engine.detokenizer import IncrementalDetokenizer, decoder
from octavo.engine.sampling_params import SamplingParams

TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog, again and again; the dog does not mind.",
    "Ein Satz mit Umlauten: äöü ß, und noch einer. Die Katze schläft über dem Ofen.",
    "你好，世界。日本語のテキスト。 안녕하세요 세계",
    "stop words: STOP, END. \n\n  indented\tlines\n",
    "emoji 😀 👩‍👩‍👧 🇩🇪 e\u0301 n\u0303",
]
SPECIAL = ["<s>", "</s>", "<|end|>"]


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|end|>"]
    )


@cache
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return wrapped(tokenizer)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return wrapped(tokenizer)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: pieces with a leading mark for a space, bytes for all else, one leading space dropped."""
    words = ["▁the", "▁dog", "▁quick", "ing", "▁ST", "OP", "你好"]
    letters = [chr(each) for each in range(33, 127)]
    pieces = ["<unk>", *SPECIAL, *(f"<0x{each:02X}>" for each in range(256)), "▁", *letters, *words]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(9 - len(piece))) for piece in pieces], 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(tokenizer)


TOKENIZERS = {"byte_level": byte_level, "metaspace": metaspace, "byte_fallback": byte_fallback}
every_tokenizer = pytest.mark.parametrize("tokenizer", [make() for make in TOKENIZERS.values()], ids=list(TOKENIZERS))

words = st.sampled_from(
    [
        *" ".join(TRAINING_TEXT).split(" "),
        "😀",
        "👩‍👩‍👧‍👦",
        "e\u0301\u0323",
        "漢字",
        "اللغة",
        "\ufffd",
        "  ",
        ".",
        ",",
        "n't",
    ]
)
texts = st.lists(words | st.text(max_size=6), max_size=12).map(" ".join)


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], skip: bool = True) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def pushed(detokenizer: IncrementalDetokenizer, ids: Sequence[int], step: int = 1) -> list[str]:
    return [detokenizer.push(ids[at : at + step]) for at in range(0, len(ids), step)]


@every_tokenizer
@settings(derandomize=True, deadline=None)
@given(parts=st.lists(texts | st.sampled_from(SPECIAL), max_size=4), skip=st.booleans(), step=st.integers(1, 5))
def test_the_text_is_that_of_decoding_all_tokens(
    tokenizer: PreTrainedTokenizerFast, parts: list[str], skip: bool, step: int
) -> None:
    ids = [token for part in parts for token in encode(tokenizer, part)]
    expected = decode(tokenizer, ids, skip)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    shown = ""
    for at in range(0, len(ids), step):
        shown += detokenizer.push(ids[at : at + step])
        assert expected.startswith(shown)
        assert detokenizer.text == shown
    assert shown + detokenizer.flush() == expected
    assert detokenizer.text == expected
    assert detokenizer.token_count == len(ids)
    assert detokenizer.stopped is None


@every_tokenizer
@settings(derandomize=True, deadline=None)
@given(prompt=texts, text=texts, cut=st.integers(0, 50))
def test_the_text_continues_the_prompt(tokenizer: PreTrainedTokenizerFast, prompt: str, text: str, cut: int) -> None:
    ids = encode(tokenizer, f"{prompt} {text}")
    cut = min(cut, len(ids))
    before, whole = decode(tokenizer, ids[:cut]), decode(tokenizer, ids)
    if not whole.startswith(before):  # the prompt ends inside a character
        return
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(), ids[:cut])
    pushed(detokenizer, ids[cut:])
    detokenizer.flush()
    assert before + detokenizer.text == whole


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 399), max_size=80), st.booleans())
def test_bytes_that_make_no_character_are_shown_as_the_tokenizer_shows_them(ids: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    ids = [each % len(tokenizer) for each in ids]
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    pushed(detokenizer, ids)
    detokenizer.flush()
    assert detokenizer.text == decode(tokenizer, ids, skip)


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
def test_part_of_a_character_is_never_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "𝄞𝄢🀄" * 20
    ids = encode(tokenizer, text)
    assert len(ids) > len(text)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
    deltas = pushed(detokenizer, ids)
    assert all(set(delta) <= set(text) | {" "} for delta in deltas)
    detokenizer.flush()
    assert detokenizer.text == decode(tokenizer, ids)


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, "a🀄")[:-1]
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
    assert "".join(pushed(detokenizer, ids)) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("tokenizer", [metaspace(), byte_fallback()], ids=["metaspace", "byte_fallback"])
def test_the_first_word_keeps_its_space_behind_a_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = encode(tokenizer, "the dog")
    prompt = encode(tokenizer, "the quick")
    for tail in ([], tokenizer.all_special_ids * 5):
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(), [*prompt, *tail])
        pushed(detokenizer, ids)
        assert detokenizer.text == " the dog"
    alone = IncrementalDetokenizer(tokenizer, SamplingParams())
    pushed(alone, ids)
    assert alone.text == "the dog"


def test_a_prompt_of_bytes_is_taken_up_where_a_character_starts() -> None:
    tokenizer = byte_fallback()
    text = "日本語のé𝄞" * 4
    for cut in range(1, len(text)):
        prompt, ids = encode(tokenizer, text[:cut]), encode(tokenizer, text)
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(), prompt)
        pushed(detokenizer, ids[len(prompt) :])
        assert detokenizer.text == text[cut:]


@pytest.mark.parametrize("tokenizer", [metaspace(), byte_fallback()], ids=["metaspace", "byte_fallback"])
def test_ids_that_the_tokenizer_does_not_know_cost_no_space(tokenizer: PreTrainedTokenizerFast) -> None:
    """A model's vocabulary is often padded beyond its tokenizer's."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
    pushed(detokenizer, [*encode(tokenizer, "the"), *range(1000, 1020), *encode(tokenizer, "dog")])
    assert detokenizer.text == "the dog"


@every_tokenizer
def test_the_work_for_a_token_does_not_grow_with_the_text(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    decode = decoder(tokenizer)

    def counting(token_ids: list[int], skip_special_tokens: bool) -> str:
        lengths.append(len(token_ids))
        return decode(token_ids, skip_special_tokens)

    ids = encode(tokenizer, " ".join(TRAINING_TEXT) * 5)
    ids += tokenizer.all_special_ids * 100 + encode(tokenizer, "the dog")
    if tokenizer is byte_level():
        ids += encode(tokenizer, "\ufffd")[:1] * 300  # a first byte that nothing completes
    monkeypatch.setattr(detokenizing, "decoder", lambda _: counting)
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(), ids * 10)
    pushed(detokenizer, ids)
    assert max(lengths) < 40
    assert sum(lengths) < 30 * len(ids)


def stopped(text: str, params: SamplingParams) -> IncrementalDetokenizer:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    pushed(detokenizer, encode(tokenizer, text))
    detokenizer.flush()
    return detokenizer


def first_stop(text: str, stops: Sequence[str], after: int) -> tuple[int, int, str] | None:
    """Brute force: read on behind `after` characters until the text read ends with a stop string."""
    for end in range(after + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, end - len(stop), stop
    return None


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    text=st.text("abc ", max_size=40),
    stops=st.lists(st.text("abc ", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    step=st.integers(1, 4),
    minimum=st.just(0) | st.integers(1, 12),
)
def test_text_ends_at_the_stop_string_that_is_complete_first(
    text: str, stops: list[str], include: bool, step: int, minimum: int
) -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, text)
    params = SamplingParams(stop=stops, include_stop_text=include, min_tokens=minimum)
    detokenizer = IncrementalDetokenizer(tokenizer, params)
    shown = "".join(pushed(detokenizer, ids, step)) + detokenizer.flush()
    found = first_stop(text, stops, after=len(decode(tokenizer, ids[: max(0, minimum - 1)])))
    assert detokenizer.text == shown
    if found is None:
        assert (shown, detokenizer.stopped, detokenizer.token_count) == (text, None, len(ids))
        return
    end, start, stop = found
    assert (shown, detokenizer.stopped) == (text[: end if include else start], stop)
    needed = next(count for count in range(len(ids) + 1) if len(decode(tokenizer, ids[:count])) >= end)
    assert detokenizer.token_count == needed


def test_what_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop="<zq>"))
    assert detokenizer.push(encode(tokenizer, "x<")) == "x"
    assert detokenizer.push(encode(tokenizer, "z")) == ""
    assert detokenizer.push(encode(tokenizer, "<")) == "<z"
    assert detokenizer.text == "x<z"
    assert detokenizer.flush() == "<"


def test_nothing_is_taken_after_a_stop() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=["END"]))
    ids = encode(tokenizer, "a END")
    assert detokenizer.push([*ids, *encode(tokenizer, " and more")]) == "a "
    assert detokenizer.push(encode(tokenizer, "more")) == ""
    assert detokenizer.flush() == ""
    assert (detokenizer.text, detokenizer.stopped, detokenizer.token_count) == ("a ", "END", len(ids))


def test_a_stop_string_that_is_a_special_token_needs_it_shown() -> None:
    assert stopped("a<|end|>b", SamplingParams(stop="<|end|>")).text == "ab"
    assert stopped("a<|end|>b", SamplingParams(stop="<|end|>", skip_special_tokens=False)).text == "a"
