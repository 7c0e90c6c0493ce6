"""The soak's clients on the shared server, for a moment; and that what they look at can fail."""

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import Live
from tests.soak import clients
from tests.soak.clients import Clients
from tests.soak.known import Known, learn
from tests.soak.memory import Memory
from tests.soak.served import Held, Served

UNKNOWN = Known("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 3}}, text="surely not")


def served(server: Live) -> Served:
    """As the soak knows one; nothing here ends it."""
    process: Any = None
    return Served(process, int(server.url.rpartition(":")[2]), Path())


def test_clients_of_every_kind(server: Live, http: httpx.Client) -> None:
    async def act() -> Clients:
        chance, one = random.Random(0), served(server)
        several = Clients(one, await learn(one, chance, 6), chance)
        kinds = (clients.complete, clients.cancel, clients.stall, clients.several, clients.deadline, clients.half)
        await asyncio.gather(*(several.act(kind) for kind in kinds for _ in range(3)))
        return several

    several = asyncio.run(act())
    assert several.faults == []
    assert several.tally["complete", "answered rightly"] == 3
    assert several.tally["several", "answered"] == 3


@pytest.mark.parametrize(
    ("kind", "draining", "fault"),
    [
        (clients.complete, False, "instead of 'surely not'"),
        (clients.complete, True, "503 draining"),
        (clients.too_much, False, "200 .*, not a 422 with x"),
        (clients.stranger, False, "200"),
    ],
)
def test_what_is_wrong_is_a_fault(
    server: Live, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, kind: Any, draining: bool, fault: str
) -> None:
    """Another answer, an end that nothing explains, a status that should be another, somebody let in without a key."""
    monkeypatch.setattr(clients, "TOO_MUCH", [("/tokenize", {"inputs": "a"}, 422, "x")])
    monkeypatch.setattr(server.service.engine, "draining", draining)
    several = Clients(served(server), [UNKNOWN], random.Random(0))
    asyncio.run(several.act(kind))
    assert several.tally == {(kind.__name__, "FAULT"): 1}
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(several.faults[0])


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_memory_that_grows(slope: float) -> None:
    memory, faults = Memory(), list[str]()
    for at in range(300):
        memory.add(2.0 * at, Held(100 + slope * at, 10, 5), 1, Held(200, 10, 5))
    memory.judge(faults)
    assert [fault.split("'")[0] for fault in faults] == (["the server"] if slope else [])
