"""Whoever raises on the client's side of an `octavo.AsyncEngine` harms only themselves."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngine
from octavo.engine import detokenizer
from octavo.hooks import StepStats
from tests import checkpoints
from tests.async_engines import assert_clean, long_request, running
from tests.test_llm import greedy, prompt_of


def test_a_tokenizer_or_an_observer_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with running(checkpoints.make("llama", tmp_path)) as engine:
            await the_tokenizer_raises(engine, monkeypatch)
            await an_observer_raises(engine)
            assert engine.healthy

    asyncio.run(story())
    assert caplog.text.count("could not be put together") == 2
    assert caplog.text.count("on_step raised") == 1


async def the_tokenizer_raises(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and in the middle."""
    whole = detokenizer.decoder

    def decoder(tokenizer: Any) -> Callable[[list[int], bool], str]:
        def failing(ids: list[int], skip_special_tokens: bool) -> str:
            if 241 in ids:
                raise OverflowError("what a token")
            return whole(tokenizer)(ids, skip_special_tokens)

        return failing

    monkeypatch.setattr(detokenizer, "decoder", decoder)
    other = await engine.submit(prompt_of(20), greedy(30, logit_bias={241: -100}))
    with pytest.raises(OverflowError, match="what a token"):
        await engine.submit([1, 241], greedy(900))
    later = await engine.submit([1, 2], greedy(900, logit_bias={241: 100}, n=2))
    with pytest.raises(OverflowError, match="what a token"):
        await later.result()
    assert len((await other.result()).completions[0].token_ids) == 30
    await assert_clean(engine)
    monkeypatch.undo()


async def an_observer_raises(engine: AsyncEngine) -> None:
    def failing(step: StepStats) -> None:
        raise OverflowError("what a step")

    engine.on_step = failing
    assert len((await (await long_request(engine, tokens=9)).result()).completions[0].token_ids) == 9
    assert engine.on_step is None
