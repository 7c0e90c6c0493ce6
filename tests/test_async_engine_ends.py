"""How an `octavo.AsyncEngine` ends: killed, failed at its start, drained, closed, or left by its parent."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngine
from octavo.async_engine import Draining, EngineDied, EngineFailed, RequestPoisoned, RequestRefused, RequestStream
from octavo.settings import Settings
from tests import checkpoints
from tests.async_engines import PATIENCE, assert_clean, has_ended, kill, long_request, running, start
from tests.distributions import write_distribution
from tests.test_llm import greedy, prompt_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


def is_healthy(engine: AsyncEngine) -> bool:
    """A call, which no type checker takes for a constant."""
    return engine.healthy


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_killed_twice(folder: Path) -> None:
    """Requests end with EngineDied behind the tokens that came, and another process answers the next ones.

    One that was there both times is refused; but one that the process did not live to refuse is not, once another has.
    """

    async def ends(engine: AsyncEngine, poison: RequestStream) -> None:
        """While one request has tokens, others wait, and one is on its way."""
        process = engine.info.process_id
        other = await long_request(engine, 1 + process, n=2)
        await anext(poison)
        os.kill(process, signal.SIGSTOP)
        asking = asyncio.create_task(engine.submit([999_999], greedy(5)))
        await asyncio.sleep(0)
        kill(engine)
        with pytest.raises(EngineDied, match=r"SIGKILL.*is started again"):
            await poison.result()
        for one in (other.result(), asking):
            with pytest.raises(EngineDied):
                await one
        assert not is_healthy(engine)
        with pytest.raises(EngineDied, match="SIGKILL"):
            await long_request(engine, 2)
        assert (await engine.stats()).blocks_total > 0, "the last known numbers"
        await engine.wait_healthy()
        assert is_healthy(engine)
        assert engine.info.process_id != process
        with pytest.raises(RequestRefused, match="not in the vocabulary"):
            await engine.submit([999_999], greedy(5))

    async def story() -> None:
        async with running(folder) as engine:
            for _ in range(2):
                await ends(engine, await long_request(engine))
            for seed in (None, 5):
                with pytest.raises(RequestPoisoned, match="ended 2 times while it had this request"):
                    await engine.submit(prompt_of(20), greedy(900, seed=seed))
            for seed in (1, 2):
                answered = await (await long_request(engine, seed, 30)).result()
                assert len(answered.completions[0].token_ids) == 30
            await assert_clean(engine)

    run(story())


def test_no_more_starts_than_allowed(folder: Path) -> None:
    async def story() -> None:
        async with running(folder, engine_restarts=0) as engine:
            stream = await long_request(engine)
            kill(engine)
            with pytest.raises(EngineDied, match="SIGKILL"):
                await stream.result()
            with pytest.raises(EngineDied, match="no further start follows, engine_restarts is 0"):
                await engine.wait_healthy()
            assert not is_healthy(engine)
            with pytest.raises(EngineDied, match="no further start"):
                await long_request(engine)

    run(story())


DEADLY = """
import os
from octavo import hookimpl

class Deadly:
    def __call__(self, output_ids, logits):
        if len(output_ids) == 2:
            os._exit(7)
        return logits

@hookimpl
def octavo_logits_processors(params, tokenizer):
    if params.presence_penalty == 1:
        return Deadly()
    if params.presence_penalty == 2:
        raise LookupError("no processor today")
"""


def test_a_plugin_that_ends_the_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises costs nobody anything; one that ends it is stopped by the second death, not by the restarts."""
    write_distribution(tmp_path, "octavo-deadly", "1.0", DEADLY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    async def story() -> None:
        async with running(folder, engine_restarts=2) as engine:
            raising = await engine.submit(prompt_of(5), greedy(5, presence_penalty=2))
            assert len((await raising.result()).completions[0].token_ids) == 5
            for _ in range(2):
                await engine.wait_healthy()
                stream = await engine.submit(prompt_of(5), greedy(5, presence_penalty=1))
                with pytest.raises(EngineDied, match="ended with status 7"):
                    await stream.result()
                assert len(stream.output.completions[0].token_ids) <= 2, "what it had got out by then"
            await engine.wait_healthy()
            with pytest.raises(RequestPoisoned):
                await engine.submit(prompt_of(5), greedy(5, presence_penalty=1))

    run(story())


# Starts that fail


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_total_tokens": 5000}, "^max_total_tokens is 5000, the model takes at most 1024 positions: lower it$"),
        ({"attention": "nobodys"}, "nobodys"),
        ({"model_id": "/nowhere"}, "^there is no model at /nowhere"),
    ],
)
def test_a_start_that_fails_says_what_the_process_said(folder: Path, settings: dict[str, Any], message: str) -> None:
    async def story() -> None:
        with pytest.raises(EngineFailed, match=message) as error:
            await AsyncEngine.start(Settings(**{"model_id": str(folder), "device": "cpu"} | settings))
        assert "Traceback" not in str(error.value)

    run(story())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "there is no model at /nowhere/at/all"), ({"load_format": "dummy"}, "no configuration at /nowhere/at/all")],
)
def test_a_model_that_is_not_there_starts_no_process(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.child._spawn", None)
    with pytest.raises(EngineFailed, match=message):
        asyncio.run(AsyncEngine.start(Settings(model_id="/nowhere/at/all", **settings)))


def test_a_start_that_is_given_up_leaves_no_process(folder: Path) -> None:
    async def story() -> set[int]:
        starting = asyncio.create_task(start(folder))
        while not (processes := children() - before):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        return processes

    before = children()  # what another test may have left, such as a tracker of what processes share
    assert all(has_ended(process) for process in asyncio.run(story()))


def children() -> set[int]:
    """Processes of this one."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    return {int(process) for process in listed}


# Ends that are wanted


def test_drained(folder: Path) -> None:
    """What runs is answered, nothing new is taken, and the process is gone."""

    async def story() -> None:
        engine = await start(folder)
        stream = await long_request(engine, tokens=100)
        draining = asyncio.create_task(engine.drain(PATIENCE))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await long_request(engine, 1)
        assert is_healthy(engine)
        assert len((await stream.result()).completions[0].token_ids) == 100
        await draining
        assert not is_healthy(engine)
        assert has_ended(engine.info.process_id)

    run(story())


def test_drained_for_too_long_or_closed(folder: Path) -> None:
    """Closing again is no error."""

    async def story() -> None:
        for end in ("drain", "close"):
            engine = await start(folder)
            stream = await long_request(engine)
            await asyncio.gather(engine.drain(0) if end == "drain" else engine.close(), engine.close())
            with pytest.raises(EngineDied, match="shut down"):
                await stream.result()
            assert has_ended(engine.info.process_id)

    run(story())


def test_a_process_that_does_not_listen_is_ended_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.async_engine.STOP_SECONDS", 0.1)

    async def story() -> None:
        engine = await start(folder)
        os.kill(engine.info.process_id, signal.SIGSTOP)
        await engine.close()
        assert has_ended(engine.info.process_id)

    run(story())


PARENT = """
import asyncio, sys
from octavo import AsyncEngine, SamplingParams
from octavo.settings import Settings

async def main():
    engine = await AsyncEngine.start(Settings(model_id=sys.argv[1], device="cpu"))
    stream = await engine.submit([1, 2, 3], SamplingParams(max_tokens=900, ignore_eos=True))
    await anext(stream)
    print(engine.info.process_id, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_outlives_a_parent_that_is_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", PARENT, folder], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        assert list(tmp_path.glob("octavo-*"))
        parent.kill()
    assert has_ended(process)
    assert not list(tmp_path.glob("octavo-*"))
