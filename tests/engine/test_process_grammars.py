"""Grammars that are being compiled, behind the engine's socket: the end does not wait for them all."""

import threading
from collections.abc import Iterator

import msgspec
import pytest

from octavo.engine import messages
from octavo.engine.engine import Engine
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.wire import prompt_bytes
from octavo.grammar import Regex
from octavo.hooks import LogitsProcessor
from tests.engine.socket_client import WAIT_MS, Client, behind_sockets
from tests.engine.test_engine import start


@pytest.fixture
def client() -> Iterator[Client]:
    with behind_sockets() as connect:
        yield connect(start())


def test_stop_waits_for_no_grammar(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is being compiled, and another waits behind it, which is never begun."""
    begun, go_on = threading.Event(), threading.Event()
    compiled = []

    def compiles(engine: Engine, params: SamplingParams, tokenizer: object) -> list[list[LogitsProcessor]]:
        compiled.append(params.grammar)
        begun.set()
        go_on.wait()
        return [[]]

    monkeypatch.setattr(Engine, "logits_processors", compiles)
    before = set(threading.enumerate())
    for ticket in range(2):
        params = msgspec.Raw(msgspec.msgpack.encode(SamplingParams(grammar=Regex(f"{ticket}"))))
        client.send(messages.Submit(ticket, prompt_bytes([1, 2]), params))
    client.service.turn()
    assert begun.wait(WAIT_MS / 1000)
    client.send(messages.Stop())
    client.service.run()
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert compiled == [Regex("0")]
