"""Each hook asks every plugin; one that raises loses only its own answer."""

import logging
import subprocess
import sys
from typing import Any

import pytest

from octavo import hooks
from octavo.attention.device import BUILT_IN, CPU
from octavo.attention.installed import backends, devices
from octavo.hooks import RequestSummary, StepStats, hookimpl
from octavo.plugins import Plugins
from tests.distributions import Offers, backend, plugins_of, spec


def test_backends_are_asked_for_once() -> None:
    class Counting(Offers):
        calls = 0

        @hookimpl
        def octavo_attention_backends(self) -> list[Any]:
            self.calls += 1
            return [*self.backends, *self.backends]

    plugin = Counting([backend("one")])
    plugins = plugins_of(plugin)
    for _ in range(2):
        assert [one.kind.qualified_name() for one in backends(plugins)] == ["test/one"]
    assert plugin.calls == 1


def test_devices_come_with_octavo_and_from_plugins() -> None:
    class HPU(CPU):
        name = "hpu"

    plugins = plugins_of(Offers(devices=[HPU, type("Nameless", (CPU,), {"name": ""}), int]))
    assert [one.kind for one in devices(plugins)] == [*BUILT_IN, HPU]
    assert [fault.where for fault in plugins.faults] == ["octavo_devices"] * 2


class Ranks:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def octavo_rank_backends(self, names: list[str]) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def rank(*answers: Any) -> tuple[list[str] | None, Plugins]:
    """What plugins asked in this order say of backends a and b. Pluggy asks the last registered first."""
    plugins = plugins_of(*(Ranks(answer) for answer in reversed(answers)))
    return plugins.rank_backends(spec(), CPU(), ["test/a", "test/b"]), plugins


def test_the_first_answer_ranks() -> None:
    assert rank(None, ["test/b"], ["test/a"])[0] == ["test/b"]
    assert rank(None, None)[0] is None
    assert rank()[0] is None


@pytest.mark.parametrize("wrong", [OSError("no file"), "test/b", 5, ["test/c"], [["test/a"]]], ids=repr)
def test_a_wrong_ranking_loses_only_itself(wrong: Any) -> None:
    answer, plugins = rank(wrong, ["test/b", "test/a"])
    assert answer == ["test/b", "test/a"]
    assert [fault.where for fault in plugins.faults] == ["octavo_rank_backends"]
    plugins.rank_backends(spec(), CPU(), ["test/a", "test/b"])
    assert len(plugins.faults) == 1


class Processes:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def octavo_logits_processors(self, params: Any) -> Any:
        return self.answer(params)


def test_logits_processors_of_all_plugins() -> None:
    first, second = (lambda ids, logits: logits), (lambda ids, logits: -logits)
    answers = [lambda _: second, lambda _: 5, lambda params: params["none"], lambda _: None, lambda _: first]
    plugins = plugins_of(*map(Processes, answers))
    for _ in range(2):
        assert plugins.logits_processors({}, None) == [first, second]
    assert [fault.origin.entry_point for fault in plugins.faults] == ["plugin2", "plugin1"]


STEP = StepStats(
    seconds=0.1,
    prefill_tokens=1,
    decode_tokens=2,
    running=3,
    waiting=4,
    preempted=0,
    free_blocks=5,
    cached_blocks=6,
    held_blocks=7,
)
REQUEST = RequestSummary(
    request_id=1,
    finish_reason="eos",
    prompt_tokens=2,
    cached_tokens=1,
    generated_tokens=3,
    preemptions=0,
    first_token_seconds=None,
    seconds=1.0,
)


class Watches:
    def __init__(self, error: BaseException | None = None) -> None:
        self.seen: list[Any] = []
        self.error = error

    def _see(self, what: Any) -> None:
        self.seen.append(what)
        if self.error:
            raise self.error

    @hookimpl
    def octavo_step_finished(self, step: Any) -> None:
        self._see(step)

    @hookimpl
    def octavo_request_finished(self, request: Any) -> None:
        self._see(request)


def test_observers_are_told() -> None:
    watcher = Watches()
    plugins = plugins_of(watcher)
    plugins.step_finished(STEP)
    plugins.request_finished(REQUEST)
    assert watcher.seen == [STEP, REQUEST]


def test_an_observer_that_raises_is_not_told_again(caplog: pytest.LogCaptureFixture) -> None:
    watchers = [Watches(), Watches(ValueError("full disk")), Watches()]
    plugins = plugins_of(*watchers)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            plugins.step_finished(STEP)
    assert [len(watcher.seen) for watcher in watchers] == [3, 1, 3]
    assert caplog.text.count("full disk") == 1
    plugins.request_finished(REQUEST)
    assert [len(watcher.seen) for watcher in watchers] == [4, 2, 4]


class PanicException(BaseException):
    """What a library in Rust raises through PyO3 where it panics."""


@pytest.mark.parametrize("error", [PanicException("unwrap on None"), SystemExit(1)], ids=repr)
def test_what_is_no_exception_is_a_plugins_fault_too(error: BaseException) -> None:
    def raises(params: Any) -> Any:
        raise error

    watchers = [Watches(error), Watches()]
    plugins = plugins_of(Processes(raises), *watchers)
    assert plugins.logits_processors({}, None) == []
    for _ in range(2):
        plugins.step_finished(STEP)
    assert [len(watcher.seen) for watcher in watchers] == [1, 2]
    assert [fault.where for fault in plugins.faults] == ["octavo_logits_processors", "octavo_step_finished"]


def test_an_interrupt_is_no_plugins_fault() -> None:
    def raises(params: Any) -> Any:
        raise KeyboardInterrupt

    plugins = plugins_of(Processes(raises), Watches(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        plugins.logits_processors({}, None)
    with pytest.raises(KeyboardInterrupt):
        plugins.step_finished(STEP)
    assert plugins.faults == []


@pytest.mark.parametrize("hook", hooks.HOOKS)
def test_hooks_are_documented(hook: str) -> None:
    assert len(getattr(hooks, hook).__doc__) > 40


def test_a_plugin_module_is_light() -> None:
    """Every start loads every plugin: the marks must not bring torch."""
    check = "import sys, octavo.hooks, octavo_reference.plugin; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", check], check=True)
