"""`octavo serve` as a process: its end by signals, the death of its engine, and a start that cannot be."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from octavo import AsyncEngine
from octavo.cli import app
from octavo.server import run as server_run
from octavo.server.http import Server
from octavo.settings import Settings
from tests import checkpoints
from tests.checkpoints import EOS
from tests.server.live import Live, live, until

LONG: dict[str, Any] = {"prompt": "count", "max_tokens": 32_000, "logit_bias": {str(EOS): -100}, "stream": True}
SOME: dict[str, Any] = LONG | {"max_tokens": 300}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=32_768)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def command(*arguments: str) -> subprocess.Popen[str]:
    """One variable is misspelt, and warned of before the settings say how the log is written; one is a former name."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment |= {"MAX_STOP_SEQUENCE": "1", "MAX_INPUT_LENGTH": "30000"}
    words = [sys.executable, "-c", "from octavo.cli import main; main()", "serve", *arguments]
    return subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@contextmanager
def octavo_serve(model: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server that is healthy."""
    port = free_port()
    process = command(
        str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--max-batch-total-tokens", "65536",
        "--json-output", *arguments,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            until(lambda: process.poll() is not None or is_healthy(http))
            assert process.poll() is None, process.communicate()[1]
            yield process, http
    finally:
        process.kill()
        process.communicate()


def is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def finish_reasons(lines: Iterator[str]) -> list[Any]:
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]


def test_an_engine_that_dies_and_a_server_that_ends(model: Path) -> None:
    """Requests get a 503 that says so, health is red, then all is well again; SIGTERM waits for what runs."""
    with octavo_serve(model, "--engine-restart-seconds", "2") as (process, http):
        with http.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            info = http.get("/info").json()
            assert info["max_input_tokens"] == 30_000
            os.kill(info["engine_process_id"], signal.SIGKILL)
            data = [line[6:] for line in lines if line.startswith("data: ")]
        error = json.loads(data[-1])["error"]
        assert (error["http_status_code"], error["code"]) == (503, "engine_died")
        red = http.get("/health")
        assert (red.status_code, red.json()["error_type"]) == (503, "healthcheck")
        refused = http.post("/generate", json={"inputs": "a"})
        assert (refused.status_code, refused.json()["error_type"]) == (503, "engine_died")
        assert refused.headers["retry-after"] == "1"
        assert "octavo_engine_up 0.0" in http.get("/metrics").text
        until(lambda: is_healthy(http))
        with http.stream("POST", "/v1/completions", json=SOME) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert finish_reasons(lines)[-1] == "length"
        _, log = process.communicate(timeout=120)
        assert process.returncode == 0, log
        told = [json.loads(line) for line in log.splitlines()]  # of both processes, and of all libraries
        assert [line["status"] for line in told if line.get("path") == "/v1/completions"] == [200, 200]
        assert all({"timestamp", "level", "logger", "message"} <= line.keys() for line in told)
        misspelt = [line["level"] for line in told if "MAX_STOP_SEQUENCES" in line["message"]]
        assert misspelt == ["WARNING"]


def test_what_does_not_finish_is_told_so(model: Path) -> None:
    """As a signal would have it, but in this process."""
    with (
        live(model, graceful_termination_timeout=0.2, max_batch_total_tokens=65_536) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        http.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.loop.call_soon_threadsafe(server.http.stop)
        data = [line[6:] for line in lines if line.startswith("data: ")]
        error = json.loads(data[-1])["error"]
        assert (error["http_status_code"], error["type"]) == (503, "server_error")
        assert not server.http.force_exit


def test_a_second_signal_ends_at_once(server: Live) -> None:
    """In this process, and without an engine: what runs is a request whose body never comes."""
    real = server.service.engine
    told: list[float] = []

    async def drain(seconds: float) -> None:
        told.append(seconds)

    engine: Any = SimpleNamespace(info=real.info, tokenizer=real.tokenizer, on_step=None, drain=drain)

    async def work() -> None:
        http = Server(engine, Settings(graceful_termination_timeout=1000))
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
        writer.write(head + b"Expect: 100-continue\r\n\r\n")
        assert b"100" in await reader.readline()  # it runs, and so the signals have their handlers
        os.kill(os.getpid(), signal.SIGTERM)
        while not told:
            await asyncio.sleep(0)
        assert (told, http.force_exit, serving.done()) == ([1000], False, False)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(serving, 120)
        assert http.force_exit
        writer.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--max-best-of", "0"],
            "octavo: max_best_of is '0' (flag --max-best-of): it must be a whole number at least 1",
        ),
        (["/nowhere/at/all"], "there is no model at /nowhere/at/all"),
        (["--config", "/nowhere.toml"], "octavo_config is /nowhere.toml, which cannot be read"),
    ],
)
def test_a_start_that_cannot_be(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.logs.configure", lambda as_json: None)  # the log is pytest's
    result = CliRunner().invoke(app, ["serve", "--host", "127.0.0.1", "--port", "0", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert "\n" not in result.stderr.strip()


def test_a_port_in_use_is_told_before_the_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.logs.configure", lambda as_json: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "/nowhere/at/all", "--host", "127.0.0.1", "--port", str(port)])
    assert result.exit_code == 2
    assert f"host is 127.0.0.1 and port {port}: Address already in use" in result.stderr


def test_a_client_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, also while the client's own machine still answers."""
    monkeypatch.setattr(server_run, "STALLED_SECONDS", 0.1)
    with (
        server_run._bound(Settings(host="127.0.0.1", port=0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        with pytest.raises(OSError, match="timed out"):
            connection.sendall(bytes(2**28))


def test_without_its_libraries_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.logs.configure", lambda as_json: None)
    monkeypatch.delitem(sys.modules, "octavo.server.http", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(app, ["serve", "demo"])
    assert result.exit_code == 2
    assert result.stderr.strip() == "octavo: the server needs uvicorn: pip install 'octavo[serve]'"


def test_a_library_that_cannot_be_imported_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def start(settings: Settings) -> AsyncEngine:
        try:
            return await asyncio.Future()
        finally:
            ended.append(settings)

    monkeypatch.setattr(AsyncEngine, "start", start)
    monkeypatch.delitem(sys.modules, "octavo.server.http", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "octavo.server.app", raising=False)
    settings = Settings(host="127.0.0.1", port=0)
    with pytest.raises(ModuleNotFoundError, match="fastapi"):
        server_run.serve(settings)
    assert ended == [settings]
