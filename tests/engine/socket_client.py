"""The client's end of an engine's socket, for tests: it lets the engine take its turns, and keeps what comes."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from octavo.engine import messages
from octavo.engine.process import Service, connect
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.wire import prompt_bytes
from tests.engine.memory_runner import Answers

WAIT_MS = 60_000
"""For a message that must come; the tests fail without it and never wait for it."""


@dataclass
class Client:
    """The other end of the socket, and what came to it."""

    service: Service
    answers: Answers
    socket: zmq.Socket[bytes]
    tickets: int = 0
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    details: dict[int, messages.Details] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    def send(self, message: object) -> None:
        self.socket.send(message if isinstance(message, bytes) else messages.encode(message))

    def submit(self, prompt: list[int], max_tokens: int = 5, tenant: str = "", salt: str = "", **params: Any) -> Any:
        """Its answer."""
        return self.send_submit(
            prompt_bytes(prompt), SamplingParams(max_tokens=max_tokens, **params), tenant=tenant, cache_salt=salt
        )

    def send_submit(self, prompt: bytes, params: object, **others: str) -> Any:
        self.tickets += 1
        raw = msgspec.Raw(msgspec.msgpack.encode(params))
        return self.ask(messages.Submit(self.tickets, prompt, raw, **others))

    def ask(self, question: object) -> Any:
        """Send something and take the first that comes back and is no output."""
        self.send(question)
        while True:
            self.service.turn()
            while self.socket.poll(0):
                if (message := self.take()) is not None:
                    return message

    def take(self) -> messages.FromEngine | None:
        """The next message, unless it is one of outputs."""
        assert self.socket.poll(WAIT_MS)
        message = messages.decode_from_engine(self.socket.recv())
        if not isinstance(message, messages.Outputs):
            return message
        self.steps += 1
        for place, (sequence, token) in enumerate(zip(message.sequences, message.tokens, strict=True)):
            if token >= 0:
                self.tokens[sequence].append(token)
            self.cached[sequence] = message.cached_tokens[place]
            if place in message.details:
                self.details[sequence] = message.details[place]
        return None

    def drain(self) -> None:
        """Let it run until it is idle."""
        while self.service.engine.busy:
            self.service.turn()
        while self.socket.poll(0):
            self.take()

    def stats(self) -> messages.EngineStats:
        stats = self.ask(messages.AskStats(0))
        assert isinstance(stats, messages.EngineStats)
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total
        return stats


Connect = Callable[[Answers], Client]


@contextmanager
def behind_sockets() -> Iterator[Connect]:
    """Puts engines behind sockets, which are closed at the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ExitStack() as sockets:

        def make(answers: Answers) -> Client:
            mine = sockets.enter_context(context.socket(zmq.PAIR))
            mine.set(zmq.RCVHWM, 1)  # all that waits has to wait on the engine's side
            mine.bind("inproc://engine")
            theirs = sockets.enter_context(connect(context, "inproc://engine"))
            return Client(Service(answers.engine, theirs), answers, mine)

        yield make
    context.term()
