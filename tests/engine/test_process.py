"""The engine behind a socket, turn by turn: no process and no model, but real scheduling (see `test_engine`)."""

from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from octavo.engine import messages
from octavo.engine.messages import BLOCK_STATES
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.snapshot import Totals
from octavo.engine.snapshot import snapshot as take
from octavo.engine.wire import prompt_bytes
from octavo.kv.node import Namespace
from tests.engine.memory_runner import VOCABULARY, prompt_of
from tests.engine.slot_memory import continuation
from tests.engine.socket_client import Client, Connect, behind_sockets
from tests.engine.test_engine import ahead, start  # noqa: F401 (every test in turn and ahead)


@pytest.fixture
def over() -> Iterator[Connect]:
    with behind_sockets() as connect:
        yield connect


@pytest.fixture
def client(over: Connect) -> Client:
    return over(start())


# Requests and their tokens


def test_tokens_of_a_step_come_in_one_message(client: Client) -> None:
    prompts = [prompt_of(10 + index, index) for index in range(20)]
    accepted = [client.submit(prompt, 12) for prompt in prompts]
    client.drain()
    assert [answer.ticket for answer in accepted] == list(range(1, 21))
    for answer, prompt in zip(accepted, prompts, strict=True):
        (sequence,) = answer.sequences
        assert client.tokens[sequence] == continuation(prompt, 12, VOCABULARY)
        assert client.details[sequence].finish_reason == "length"
    assert client.steps == client.service.engine.steps < 60


def test_several_answers_are_one_submission(client: Client) -> None:
    accepted = client.submit(prompt_of(10), 6, n=2, best_of=3)
    client.drain()
    assert len(accepted.sequences) == len(set(accepted.sequences)) == 3
    assert all(len(client.tokens[sequence]) == 6 for sequence in accepted.sequences)


def test_prompt_logprobs_cross_whole(client: Client) -> None:
    """The slot memory answers with the prompt's tokens in their place; one of the two sequences brings them."""
    prompt = prompt_of(30)
    first, second = client.submit(prompt, 1, n=2, prompt_logprobs=0).sequences
    client.drain()
    found = client.details[first].prompt
    assert found is not None
    assert found.logprobs == prompt[1:]
    assert found.top_token_ids == found.top_logprobs == [[]] * 29
    assert client.details[second].prompt is None


def test_a_client_that_does_not_read_holds_nothing_up(over: Connect) -> None:
    """More messages than any queue of ZeroMQ's takes by default; all of them are there when it reads."""
    client = over(start(blocks=800, max_total_tokens=3000))
    client.send(messages.Submit(1, prompt_bytes([1, 2, 3]), msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 2900}))))
    client.service.turn()
    while client.service.engine.busy:
        client.service.turn()
    client.drain()
    assert list(client.tokens.values()) == [continuation([1, 2, 3], 2900, VOCABULARY)]


def test_stop_ends_the_loop(client: Client) -> None:
    client.submit(prompt_of(10), 400)
    client.send(messages.Stop())
    client.service.run()
    assert client.service.stopped


# What is wrong


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x00", b"\xff" * 1000, b"\x93\x01", msgspec.msgpack.encode({"type": "submit"}),
        msgspec.msgpack.encode({"type": "eval", "code": "1"}), msgspec.msgpack.encode([["submit"]]),
        msgspec.msgpack.encode({"type": "cancel", "sequence": "all", "reason": "stop"}),
        messages.encode(messages.Accepted(1, [1])), messages.encode(messages.Start({"model_id": "x"})),
    ],
)  # fmt: skip
def test_what_is_no_message_is_answered_and_dropped(client: Client, data: bytes) -> None:
    sequence = client.submit(prompt_of(10), 8).sequences[0]
    assert isinstance(client.ask(data), messages.Invalid)
    client.drain()
    assert client.tokens[sequence] == continuation(prompt_of(10), 8, VOCABULARY)


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        (prompt_bytes([1, 2]), {"temperature": -1}, "temperature=-1.* is not allowed"),
        (prompt_bytes([1, 2]), {"max_tokens": "many"}, "max_tokens='many' is not allowed|Expected"),
        (prompt_bytes([1, 2]), {"unknown": 1}, "unknown"),
        (prompt_bytes([1, 2]), [1, 2], "Expected"),
        (b"12345", {}, "multiple of"),
        (b"", {}, "no tokens"),
        (prompt_bytes([1, VOCABULARY]), {}, "not in the vocabulary"),
        (prompt_bytes([1, 2]), {"max_tokens": 10_000}, "max_total_tokens"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_its_ticket(
    client: Client, prompt: bytes, params: object, reason: str
) -> None:
    answer = client.send_submit(prompt, params)
    assert isinstance(answer, messages.Refused)
    assert answer.ticket == client.tickets
    with pytest.raises(ValueError, match=reason):
        raise ValueError(answer.reason)
    assert "Error: " not in answer.reason
    assert "Refused: " not in answer.reason
    assert not client.service.engine.busy


def test_a_step_that_fails_tells_its_requests_why(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    sequence = client.submit(prompt_of(10), 8).sequences[0]
    client.answers.runner.failing = MemoryError("the device is out of memory")
    client.drain()
    assert client.details[sequence].finish_reason == "error"
    assert client.details[sequence].error == "MemoryError: the device is out of memory"
    again = client.submit(prompt_of(10), 8).sequences[0]
    client.drain()
    assert client.tokens[again] == continuation(prompt_of(10), 8, VOCABULARY)


# Cancelling


@pytest.mark.parametrize("steps", range(8))
def test_cancelled_sequences_are_gone_in_the_next_turn(over: Connect, steps: int) -> None:
    """Those that wait, those whose prompts are computed, those that decode, and those that share blocks."""
    client = over(start(max_batch_prefill_tokens=10, blocks=60, max_batch_size=4))
    several = [client.submit(prompt_of(25, index), 50, n=3).sequences for index in range(3)]
    for _ in range(steps):
        client.service.turn()
    for sequence in [number for sequences in several for number in sequences]:
        client.send(messages.Cancel(sequence, "cancelled"))
        client.send(messages.Cancel(sequence, "cancelled"))
    stats = client.stats()
    assert (stats.running, stats.waiting, stats.blocks_held) == (0, 0, 0)
    assert not client.service.engine.busy


# Tenants


def test_prefixes_are_never_shared_between_tenants_or_salts(client: Client) -> None:
    """What is the same within a tenant must hit, and nobody else's may: not by any way of writing the two names."""
    whom = [
        ("", ""),
        ("a", ""),
        ("", "a"),
        ("a", "b"),
        ("b", "a"),
        ("ab", ""),
        ("", "ab"),
        ("a\x00b", ""),
        ("a", "\x00b"),
    ]
    prompt = prompt_of(41)
    for turn in range(2):
        for tenant, salt in whom:
            (sequence,) = client.submit(prompt, 4, tenant, salt).sequences
            client.drain()
            assert client.cached[sequence] == (40 if turn else 0), (tenant, salt)
            assert client.tokens[sequence] == continuation(prompt, 4, VOCABULARY)


def test_tenants_that_come_at_once_hold_blocks_of_their_own(client: Client) -> None:
    for tenant in ("a", "b", "a", "b"):
        client.submit(prompt_of(41), 50, tenant)
    for _ in range(5):
        client.service.turn()
    running = client.service.engine.scheduler.running
    blocks: dict[str, set[int]] = {"a": set(), "b": set()}
    count = 0
    for request in running:
        assert request.table is not None
        blocks[request.namespace.tenant] |= set(request.table.blocks.tolist())
        count += request.table.count
    assert len(running) == 4
    assert not blocks["a"] & blocks["b"]
    assert len(blocks["a"] | blocks["b"]) == count - 2 * 10, "ten full blocks of the prompt, shared by two"


# Numbers


def test_stats_count_what_happened(client: Client) -> None:
    client.submit(prompt_of(21), 5)
    client.drain()
    client.submit(prompt_of(21), 5)
    client.drain()
    stats = client.stats()
    assert (stats.hit_tokens, stats.queried_tokens) == (20, 42)
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (21 + 1, 4 + 4, 10)
    assert stats.last_step is not None
    assert stats.step_seconds >= stats.last_step.seconds > 0
    assert (stats.running, stats.waiting, stats.blocks_held, stats.evicted_blocks) == (0, 0, 0, 0)


def test_a_snapshot_is_the_cache_as_it_stands(client: Client) -> None:
    """Against the cache's own numbers, with requests that run, prefixes that nobody uses, and free blocks."""
    client.submit(prompt_of(30), 5, "a")
    client.submit(prompt_of(30, 5), 5, "b")
    client.drain()
    client.submit([*prompt_of(20), 1, 2, 3], 60, "a")
    for _ in range(4):
        client.service.turn()
    snapshot = client.ask(messages.AskSnapshot(7, 100))
    kv = client.service.engine.scheduler.kv
    cache = kv.stats()
    states = Counter(BLOCK_STATES[state] for state in snapshot.states)
    assert snapshot.ticket == 7
    assert states == {
        "scratch": 1, "free": cache.free, "cached": cache.cached, "pinned": cache.pinned,
        "held": cache.held - cache.pinned,
    }  # fmt: skip
    assert min(states.values()) > 0
    idle = np.frombuffer(snapshot.idle_seconds, "<f4")
    assert [seconds > 0 for seconds in idle] == [BLOCK_STATES[state] == "cached" for state in snapshot.states]
    nodes = snapshot.nodes
    assert snapshot.nodes_left_out == 0
    assert sum(node.blocks for node in nodes) == cache.cached + cache.pinned
    assert {node.tenant for node in nodes} == {"a", "b"}
    assert all(node.parent < place for place, node in enumerate(nodes))
    for node in nodes:
        assert node.locks <= nodes[node.parent].locks or node.parent < 0
        assert (node.idle_seconds == 0) == (node.locks > 0)
    assert (snapshot.stats.blocks_free, snapshot.stats.running) == (cache.free, 1)
    assert 0 < snapshot.seconds < 60


def test_a_snapshot_says_whose_each_block_is(client: Client) -> None:
    """Blocks of the tree by its own walk; those of a request by its table, as `kv.check` knows them."""
    client.submit(prompt_of(30), 5, "a")
    client.drain()
    accepted = [client.submit([*prompt_of(20), index], 60, "a") for index in (1, 2)]
    for _ in range(4):
        client.service.turn()
    engine = client.service.engine
    scheduler = engine.scheduler
    engine.submit(prompt_of(7, 3), SamplingParams(), seed=0, namespace=Namespace(tenant="b"))
    snapshot = take(engine, Totals(), 7, 100)
    owners = np.frombuffer(snapshot.owners, "<i4")
    held = np.frombuffer(snapshot.states, np.uint8) == BLOCK_STATES.index("held")
    assert np.array_equal(owners < -1, held)
    assert [one.id for one in snapshot.requests[:2]] == [answer.sequences[0] for answer in accepted]
    for place, request in enumerate(scheduler.running):
        shown, table = snapshot.requests[place], request.table
        assert table is not None
        path = {-2 - place} | set(upwards(snapshot.nodes, shown.node))
        assert set(np.flatnonzero(np.isin(owners, list(path)))) >= set(table.blocks.tolist())
        assert shown.blocks == table.count == np.count_nonzero(owners == -2 - place) + table.shared
        assert (shown.running, shown.prompt_tokens, shown.tokens) == (True, 21, len(request.known))
        assert shown.last_tokens == request.known[-48:].tolist()
    by_tokens = {node.tokens[:48].tobytes(): node.blocks.tolist() for node in scheduler.kv.tree.nodes()}
    for place, node in enumerate(snapshot.nodes):
        blocks = by_tokens[np.array(node.first_tokens, np.int32).tobytes()]
        assert np.flatnonzero(owners == place).tolist() == sorted(blocks)
    waiting = snapshot.requests[2]
    assert (waiting.running, waiting.blocks, waiting.node, waiting.tenant) == (False, 0, -1, "b")


def test_a_small_snapshot_shows_what_was_used_last(client: Client) -> None:
    for start_at in range(8):
        client.submit(prompt_of(30, start_at), 5)
        client.drain()
    client.submit(prompt_of(30, 2), 5)
    client.drain()
    all_of_them = client.ask(messages.AskSnapshot(7, 100))
    few = client.ask(messages.AskSnapshot(8, 2))
    whole, inside = few.nodes
    assert whole.first_tokens == prompt_of(30, 2)[: whole.tokens]
    assert (whole.parent, inside.parent) == (-1, 0)
    assert few.nodes_left_out == len(all_of_them.nodes) - 2
    assert few.states == all_of_them.states
    assert set(np.frombuffer(few.owners, "<i4").tolist()) == {-1, 0, 1}


def upwards(nodes: list[messages.CacheNode], place: int) -> Iterator[int]:
    while place >= 0:
        yield place
        place = nodes[place].parent
