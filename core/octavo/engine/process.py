"""The engine behind a socket: what the child process runs.

It takes what has arrived between two steps, without waiting for more, and waits only when it has nothing to run. All
that a step brought goes out in one message. The socket queues without limit and so never blocks a step: what can wait
in it is bounded by the requests' own limits, and the client takes it off at once and cancels what nobody reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from octavo import __version__, logs
from octavo.engine import messages
from octavo.engine.build import Built, open_engine
from octavo.engine.request import FinishReason, Label
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.snapshot import Totals, snapshot
from octavo.engine.wire import pack, prompt_tokens
from octavo.grammar import JsonObject
from octavo.hooks import GrammarRefused, LogitsProcessor
from octavo.kv.node import Namespace
from octavo.models.load import LoadedModel
from octavo.models.tokenizer import kind_of
from octavo.plugins import plugins as installed_plugins
from octavo.settings import Settings
from octavo.settled import settle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from octavo.engine.engine import Engine
    from octavo.engine.output import Output

logger = logging.getLogger(__name__)

_params = msgspec.msgpack.Decoder(SamplingParams)
_TOKENIZER = "tokenizer"
"""The folder of its files beside the socket, where it has none elsewhere."""
LINGER_MS = 2000
"""How long the process waits at its end for its last words to be taken."""


class Service:
    """One engine and the client at the other end of the socket."""

    def __init__(
        self, engine: Engine, socket: zmq.Socket[bytes], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.engine = engine
        self.stopped = False
        self._socket = socket
        self._tokenizer = tokenizer
        self._totals = Totals()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiling: list[tuple[messages.Submit, SamplingParams, Future[list[list[LogitsProcessor]]]]] = []
        """Requests whose grammar is being compiled: a large one takes longer than a step, and no step waits for it."""

    def run(self) -> None:
        """Serve until the client says stop. Raises what a step raises that the engine cannot survive."""
        try:
            while not self.stopped:
                self.turn()
        finally:  # the process would end no sooner than the last grammar that waits
            self._compiler.shutdown(wait=False, cancel_futures=True)

    def turn(self) -> None:
        """Take what has arrived, waiting for something if there is nothing to run; then run a step."""
        if not self.engine.busy:  # the last requests were cancelled while a step ran
            self.engine.settle()
            self._tell(())
        patience = 0 if self.engine.busy else 1 if self._compiling else None
        while not self.stopped and self._socket.poll(patience):
            self._take(self._socket.recv())
            patience = 0
        self._queue_compiled()
        if self.engine.busy and not self.stopped:
            self._step()

    def tell_begin(self, sequences: list[int]) -> None:
        """These run now for the first time."""
        self._send(messages.Began(sequences))

    def _step(self) -> None:
        outputs = self.engine.step()
        if not (outputs or self.engine.scheduler.running):
            raise RuntimeError("the engine has nothing to run, and requests that wait for it: please report this")
        self._tell(outputs)

    def _tell(self, outputs: Sequence[Output]) -> None:
        """Send what came, with the step that brought it; the first of steps that run ahead brings nothing at once."""
        ended = self.engine.take_stats()
        for number, step in enumerate(ended, 1):
            self._totals.add(step)
            self._send(pack(step, outputs if number == len(ended) else ()))

    def _take(self, data: bytes) -> None:
        try:
            message = messages.decode_to_engine(data)
        except msgspec.MsgspecError as error:
            logger.warning("a message of %d bytes is no message and was dropped: %s", len(data), error)
            self._send(messages.Invalid(str(error)))
            return
        match message:
            case messages.Submit():
                self._submit(message)
            case messages.Cancel():
                reason = FinishReason.STOP if message.reason == FinishReason.STOP else FinishReason.CANCELLED
                self.engine.cancel(message.sequence, reason)
            case messages.AskStats():
                self._send(self._totals.stats(self.engine, message.ticket))
            case messages.AskSnapshot():
                self._send(snapshot(self.engine, self._totals, message.ticket, message.most))
            case messages.Stop():
                self.stopped = True
            case messages.Start():
                self._send(messages.Invalid("the engine has started already"))

    def _submit(self, message: messages.Submit) -> None:
        with self._refusing(message):
            params = _params.decode(message.params)
            if params.grammar is None:
                self._queue(message, params, self.engine.logits_processors(params, self._tokenizer))
            else:
                compiling = self._compiler.submit(self.engine.logits_processors, params, self._tokenizer)
                self._compiling.append((message, params, compiling))

    def _queue_compiled(self) -> None:
        done = [one for one in self._compiling if one[2].done()]
        self._compiling = [one for one in self._compiling if one not in done]
        for message, params, compiled in done:
            with self._refusing(message):
                self._queue(message, params, compiled.result())

    def _queue(
        self, message: messages.Submit, params: SamplingParams, processors: Sequence[Sequence[LogitsProcessor]]
    ) -> None:
        sequences = self.engine.submit_all(
            prompt_tokens(message.prompt),
            params,
            namespace=Namespace(tenant=message.tenant, salt=message.cache_salt),
            processors=processors,
            label=Label(message.label, message.trace),
        )
        self._send(messages.Accepted(message.ticket, sequences))

    @contextlib.contextmanager
    def _refusing(self, message: messages.Submit) -> Iterator[None]:
        """Whatever is wrong with a request is its own affair."""
        try:
            yield
        except (ValueError, msgspec.MsgspecError) as error:
            self._send(messages.Refused(message.ticket, str(error)))
        except Exception as error:
            logger.exception("a request could not be queued")
            self._send(messages.Refused(message.ticket, f"{type(error).__name__}: {error}"))

    def _send(self, message: object) -> None:
        self._socket.send(messages.encode(message), zmq.NOBLOCK)


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's end of the socket."""
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)  # no limit
    socket.set(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket


def main(address: str) -> int:
    """Connect to the client, load what its settings name, serve; returns the exit status."""
    # A Ctrl-C at the terminal and a service manager's stop reach this process too: its parent ends it when it is time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(address,), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = connect(context, address)
    try:
        _serve(socket, _socket_file(address).parent)
    except Exception as error:
        if isinstance(error, ValueError | OSError):  # what the user can mend says so itself
            reason = str(error)
        else:
            logger.exception("the engine ends")
            reason = f"{type(error).__name__}: {error}"
        socket.send(messages.encode(messages.Failed(reason)))
        return 1
    finally:
        context.destroy(LINGER_MS)
    return 0


def _serve(socket: zmq.Socket[bytes], folder: Path) -> None:
    message = messages.decode_to_engine(socket.recv())
    if not isinstance(message, messages.Start):
        raise ValueError(f"the first message is {type(message).__name__}, not Start")
    settings = Settings(_sources=message.sources, _warn=False, _read=False, **message.settings)
    logs.configure(settings.json_output)
    settings.tell_plugins()
    plugins = installed_plugins()
    loaded, built = open_engine(
        settings, plugins, on_loaded=lambda loaded: socket.send(messages.encode(_told(loaded, folder)))
    )
    with contextlib.suppress(GrammarRefused):  # what the first grammar would wait for is got ready now
        built.engine.logits_processors(SamplingParams(grammar=JsonObject()), loaded.tokenizer)
    settle()
    socket.send(messages.encode(messages.Ready(describe(settings, loaded, built))))
    service = Service(built.engine, socket, loaded.tokenizer)
    if settings.max_queue_seconds is not None:
        built.engine.on_begin = service.tell_begin
    service.run()


def _told(loaded: LoadedModel, folder: Path) -> messages.Loaded:
    """That it is loaded. A tokenizer that was put together from a GGUF file is read from files in `folder`."""
    tokenizer, location = loaded.tokenizer, loaded.tokenizer_at
    if tokenizer is None:
        return messages.Loaded(None)
    if location is None:
        location = str(folder / _TOKENIZER)
        tokenizer.save_pretrained(location)
    return messages.Loaded(messages.Tokenizer(location, kind_of(tokenizer)))


def describe(settings: Settings, loaded: LoadedModel, built: Built) -> messages.EngineInfo:
    """What is served, and how."""
    engine, selection, memory = built.engine, built.selection, built.memory
    kv, limits = engine.scheduler.kv, engine.scheduler.limits
    return messages.EngineInfo(
        model=settings.model_id or "demo",
        revision=settings.revision,
        version=__version__,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=selection.device,
        backend=selection.name,
        selection=selection.to_dict(),
        block_size=kv.block_size,
        num_blocks=kv.pool.num_blocks - 1,
        block_bytes=memory.block_bytes,
        weight_bytes=memory.weights,
        workspace_bytes=memory.workspaces,
        activation_bytes=memory.activations,
        graph_bytes=memory.graphs,
        cache_bytes=memory.cache,
        prefix_caching=kv.prefix_caching,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_batch_prefill_tokens=limits.max_batch_prefill_tokens,
        max_batch_total_tokens=(kv.pool.num_blocks - 1) * kv.block_size,
        max_batch_size=limits.max_batch_size,
        vocab_size=engine.vocab_size,
        eos_token_ids=sorted(engine.end_ids),
        process_id=os.getpid(),
    )


def _socket_file(address: str) -> Path:
    """In a folder of the client's, which goes when the process has ended."""
    return Path(address.removeprefix("ipc://"))


def _end_with_parent(address: str) -> None:
    """End when the parent has, in the middle of a step if need be: it holds the other end of stdin."""
    while os.read(0, 4096):
        pass
    with contextlib.suppress(OSError):  # a parent that was killed has left them
        file = _socket_file(address)
        shutil.rmtree(file.parent / _TOKENIZER, ignore_errors=True)
        file.unlink()
        file.parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
