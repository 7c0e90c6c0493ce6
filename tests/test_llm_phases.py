"""`octavo.LLM` with one backend that prefills and another that decodes, over one cache."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.attention.wish import BackendUnavailable
from octavo.kv.layout import HEAD_MAJOR, PACKED, TOKEN_MAJOR, LayoutType
from octavo.plugins import Plugins
from octavo_reference.backend import ReferenceBackend
from tests import checkpoints
from tests.distributions import Offers, plugins_of
from tests.engine.harness import generate, load_reference, soil

TOKENS = 10


def counting(name: str, layout: LayoutType = TOKEN_MAJOR) -> tuple[type[ReferenceBackend], Counter[int]]:
    """A backend, and how often it was asked for how many query tokens."""
    asked: Counter[int] = Counter()

    def attend(self: ReferenceBackend, query: Tensor, *rest: Any) -> Tensor:
        asked[len(query)] += 1
        return ReferenceBackend.attend(self, query, *rest)

    members = {"name": name, "platform": "test", "contract": 1, "layout_type": layout, "attend": attend}
    return type(name.capitalize(), (ReferenceBackend,), members), asked


def load(folder: Path, plugins: Plugins, **settings: Any) -> LLM:
    llm = LLM(
        folder, attention="prefill=first,decode=second", device="cpu", dtype="float32", compile=False, block_size=16,
        max_batch_total_tokens=1024, max_batch_prefill_tokens=32, progress=False, plugins=plugins, **settings,
    )  # fmt: skip
    soil(llm.engine)
    return llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("gemma2", tmp_path_factory.mktemp("gemma2"))


@pytest.mark.parametrize("layout", [TOKEN_MAJOR, HEAD_MAJOR, PACKED], ids=["token-major", "head-major", "packed"])
def test_answers_are_those_of_transformers(folder: Path, layout: LayoutType) -> None:
    """In chunks, from cached prefixes, and in steps of both kinds."""
    (first, prefilled), (second, decoded) = counting("first", layout), counting("second", layout)
    llm = load(folder, plugins_of(Offers([first, second])))
    assert llm.selection.name == "prefill=test/first,decode=test/second"
    prompts = [torch.randint(0, 250, (length,)).tolist() for length in (70, 5, 33)]
    prompts.append([*prompts[0][:40], 7, 8, 9])
    reference = load_reference(folder)
    expected = [generate(reference, prompt, TOKENS) for prompt in prompts]
    prefilled.clear()
    decoded.clear()
    for _ in range(2):
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True), progress=False
        )
        assert [list(output.completions[0].token_ids) for output in outputs] == expected
    assert outputs[0].cached_tokens > 32
    assert max(decoded) <= len(prompts)
    assert max(prefilled) > len(prompts)


def test_a_cache_that_they_cannot_share_is_refused(folder: Path) -> None:
    """Nothing of the model is read for it: the layouts are compared, with the difference in the message."""
    (first, _), (second, _) = counting("first", TOKEN_MAJOR), counting("second", PACKED)
    with pytest.raises(
        BackendUnavailable, match="test/first and test/second cannot share a cache: their layouts differ"
    ):
        load(folder, plugins_of(Offers([first, second])))


def test_one_that_is_not_there_is_told_by_its_phase(folder: Path) -> None:
    first, _ = counting("first")
    with pytest.raises(ValueError, match='attention prefill=first,decode=second: there is no backend "second"'):
        load(folder, plugins_of(Offers([first])))
