"""Random operations on the cache against the brute force; OCTAVO_KV_SEED and OCTAVO_KV_STEPS choose others."""

import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kv.radix import Namespace
from tests.kv.brute_force import BruteForce, Request

SEED = int(os.environ.get("OCTAVO_KV_SEED", "0"))
STEPS = int(os.environ.get("OCTAVO_KV_STEPS", "100000"))
NAMESPACES = [Namespace(), Namespace(tenant="a"), Namespace(adapter="a"), Namespace(adapter="a", adapter_generation=1)]


class Traffic:
    """Requests that come, grow, and go at random. Two tokens and a memory for old texts make prefixes collide."""

    def __init__(self, cache: BruteForce, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.texts = [b"\0"]
        self.counts = dict.fromkeys(
            ("submit", "grow", "commit", "finish", "cancel", "preempt", "fail", "copy", "reset"), 0
        )

    def step(self) -> None:
        names = list(self.counts)
        name = self.random.choices(names, (30, 50, 10, 6, 4, 4, 2, 4, 0.2))[0]
        self.counts[name] += 1
        requests = self.cache.requests
        if name == "submit" and len(requests) < 6:
            self.submit(self.text(), self.random.choices(NAMESPACES, (6, 2, 1, 1))[0])
        elif name == "copy":
            self.cache.take_copies()
        elif name == "reset":
            self.cache.reset()
        elif requests:
            request = self.random.choice(requests)
            if name == "commit":
                self.cache.commit(request)
            elif name in ("submit", "grow"):
                self.grow(request)
            else:
                self.end(request, name)
        self.cache.compare_tree()

    def text(self) -> bytes:
        """The text of a request, ended or running, up to some point, and a new end."""
        size = self.cache.size
        old = self.random.choice(self.texts + [request.text for request in self.cache.requests])
        cut = self.random.choice([len(old), self.random.randint(0, len(old)), len(old) // size * size])
        new = bytes(self.random.choices((0, 1), k=self.random.choice([0, 1, 2, self.random.randint(0, size + 3)])))
        longest = size * self.cache.total * 2 // 3
        return (old[:cut] + new)[:longest] or b"\1"

    def submit(self, text: bytes, namespace: Namespace) -> None:
        request = self.cache.admit(namespace, text, use_cache=self.random.random() < 0.95)
        if not self.cache.grow(request, self.random.randint(request.computed + 1, len(text))):
            self.cache.release(request, insert=False)

    def grow(self, request: Request) -> None:
        """One step of one request: some of its prompt, or a new token."""
        target = self.random.choice([len(request.text), self.random.randint(request.computed + 1, len(request.text))])
        while not self.cache.grow(request, target):
            others = [other for other in self.cache.requests if other is not request]
            if not others:
                return
            self.end(others[-1], "preempt")
        if request.source is not None or self.random.random() < 0.5:
            self.cache.take_copies()
        self.cache.compute(request, target)
        if target == len(request.text):
            request.text += bytes([self.random.getrandbits(1)])
        if self.random.random() < 0.7:
            self.cache.commit(request)

    def end(self, request: Request, name: str) -> None:
        self.texts = [*self.texts[-12:], request.text]
        self.cache.release(request, insert=name != "fail")
        if name == "preempt" and self.random.random() < 0.5:
            self.submit(request.text, request.namespace)


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "share"),
    [
        (1, 12, 0.2),
        (1, 40, 0.1),
        (2, 10, 0.15),
        (2, 40, 0.1),
        (16, 9, 0.15),
        (16, 20, 0.1),
        (64, 14, 0.1),
        (256, 10, 0.1),
    ],
)
def test_random_operations(block_size: int, num_blocks: int, share: float) -> None:
    traffic = Traffic(BruteForce(num_blocks, block_size), SEED * 1009 + block_size * 101 + num_blocks)
    steps = round(STEPS * share)
    for _ in range(steps):
        traffic.step()
    cache = traffic.cache
    if steps > 2000:  # the walk went where it should
        assert min(traffic.counts.values()) > 0
        assert cache.evictions > steps // 50
        assert cache.hits > steps // 50
    for request in list(cache.requests):
        cache.release(request)
    cache.reset()
    assert len(cache.free) == cache.total


class Operations(RuleBasedStateMachine):
    """The same by hypothesis, which shrinks what fails to the shortest story."""

    @initialize(block_size=st.sampled_from([1, 2, 3]), num_blocks=st.integers(4, 12))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.cache = BruteForce(num_blocks, block_size)

    @rule(
        text=st.binary(min_size=1, max_size=9).map(lambda text: bytes(byte & 1 for byte in text)), tenant=st.booleans()
    )
    def admit(self, text: bytes, tenant: bool) -> None:
        self.cache.admit(NAMESPACES[tenant], text)

    @precondition(lambda self: self.cache.requests)
    @rule(data=st.data(), token=st.booleans())
    def work(self, data: st.DataObject, token: bool) -> None:
        request = data.draw(st.sampled_from(self.cache.requests))
        target = data.draw(st.integers(request.computed + 1, len(request.text)))
        if self.cache.grow(request, target):
            self.cache.take_copies()
            self.cache.compute(request, target)
            request.text += bytes([token]) * (target == len(request.text))

    @precondition(lambda self: self.cache.requests)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.cache.commit(data.draw(st.sampled_from(self.cache.requests)))

    @precondition(lambda self: self.cache.requests)
    @rule(data=st.data(), insert=st.booleans())
    def release(self, data: st.DataObject, insert: bool) -> None:
        self.cache.release(data.draw(st.sampled_from(self.cache.requests)), insert)

    @rule()
    def copy(self) -> None:
        self.cache.take_copies()

    @invariant()
    def the_trees_agree(self) -> None:
        self.cache.compare_tree()

    @rule()
    def reset(self) -> None:
        self.cache.reset()


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
