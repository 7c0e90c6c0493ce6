"""Two API keys are two tenants: what one sends is no hit for the other, whichever way it is sent."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from octavo.bench.cli import app
from octavo.bench.report import Report
from octavo.bench.tenants import KINDS
from tests.server.live import Live, live, until

KEYS = ("first-key", "second-key")
numbers = count()
Ask = Callable[[httpx.Client, str, str | None], int]
"""Sends a prompt with a salt, and says how many of its tokens were cached."""


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live(folder, api_key=",".join(KEYS), block_size=4, max_best_of=3) as running:
        yield running


@pytest.fixture
def tenants(server: Live) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Of the first key, and of the second."""
    first, second = (
        httpx.Client(base_url=server.url, timeout=120, headers={"Authorization": f"Bearer {key}"}) for key in KEYS
    )
    with first, second:
        yield first, second
    until(lambda: server.held() == (0, 0))


def new_prompt() -> str:
    """Neither it nor its reverse begins with the first letter of another one."""
    number = next(numbers)
    return f"{chr(33 + number)} a page table maps what a process sees to where it lies {chr(126 - number)}"


def usage(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def header(answer: httpx.Response) -> int:
    return int(answer.headers["x-cached-tokens"])


def last_usage(answer: httpx.Response) -> int:
    events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    return int(events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"])


def completion(client: httpx.Client, text: str, salt: str | None, **more: Any) -> httpx.Response:
    body = {"prompt": text, "max_tokens": 2, "cache_salt": salt} | more
    return client.post("/v1/completions", json=body).raise_for_status()


def chat(client: httpx.Client, text: str, salt: str | None, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": text, "content": text}], "max_tokens": 2, "cache_salt": salt} | more
    return client.post("/v1/chat/completions", json=body).raise_for_status()


STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SALTED: dict[str, Ask] = {
    "completion": lambda client, text, salt: usage(completion(client, text, salt)),
    "completion as events": lambda client, text, salt: last_usage(completion(client, text, salt, **STREAM)),
    "completion of tokens": lambda client, text, salt: usage(completion(client, "", salt, prompt=list(text.encode()))),
    "several prompts": lambda client, text, salt: usage(completion(client, "", salt, prompt=[text, text[::-1]])),
    "several answers": lambda client, text, salt: usage(completion(client, text, salt, n=2, temperature=1)),
    "the best of several": lambda client, text, salt: usage(completion(client, text, salt, best_of=3, temperature=1)),
    "chat": lambda client, text, salt: usage(chat(client, text, salt)),
    "chat as events": lambda client, text, salt: last_usage(chat(client, text, salt, **STREAM)),
    "several answers to a chat": lambda client, text, salt: usage(chat(client, text, salt, n=2, temperature=1)),
}


def generate(client: httpx.Client, route: str, text: str, **parameters: Any) -> httpx.Response:
    body = {"inputs": text, "parameters": {"max_new_tokens": 2, "details": True} | parameters}
    return client.post(route, json=body).raise_for_status()


PLAIN: dict[str, Ask] = SALTED | {
    "/generate": lambda client, text, _: header(generate(client, "/generate", text)),
    "/": lambda client, text, _: header(generate(client, "/", text)),
    "/generate, the best of several": lambda client, text, _: header(
        generate(client, "/generate", text, best_of=3, do_sample=True)
    ),
}


@pytest.mark.parametrize("way", PLAIN)
def test_a_prompt_is_cached_for_the_key_that_sent_it(tenants: tuple[httpx.Client, httpx.Client], way: str) -> None:
    first, second = tenants
    ask, text = PLAIN[way], new_prompt()
    assert ask(first, text, None) == 0
    assert ask(second, text, None) == 0
    assert ask(first, text, None) > 40
    assert ask(second, text, None) > 40


@pytest.mark.parametrize("way", SALTED)
def test_a_salt_divides_a_tenant_further(tenants: tuple[httpx.Client, httpx.Client], way: str) -> None:
    first, second = tenants
    ask, text = SALTED[way], new_prompt()
    for client in (first, second):
        for salt in ("a", "b", None):
            assert ask(client, text, salt) == 0
    assert ask(first, text, "a") > 40
    assert ask(second, text, "b") > 40


def test_routes_share_prefixes_within_a_key_alone(tenants: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = tenants
    text = new_prompt()
    generate(first, "/generate_stream", text)
    assert usage(completion(second, text, None)) == 0
    assert usage(completion(first, text, None)) > 40


def test_what_tells_of_all_tenants_is_the_first_keys(tenants: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = tenants
    assert "octavo_cached_tokens_total" in first.get("/metrics").text
    refused = second.get("/metrics")
    assert (refused.status_code, refused.json()["error_type"]) == (403, "forbidden")
    assert second.get("/info").status_code == 200


def test_the_log_tells_tenants_apart(
    tenants: tuple[httpx.Client, httpx.Client], caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> list[dict[str, Any]]:  # the answer may be here before its line is
        return [record.fields for record in caplog.records if getattr(record, "fields", {}).get("path") == "/info"]  # type: ignore[attr-defined]

    with caplog.at_level("INFO", "octavo.server.requests"):
        for client in tenants:
            client.get("/info")
        until(lambda: len(logged()) == 2 or tenants[0].get("/health").is_error)
    # As `printf first-key | sha256sum` says it.
    assert {one["tenant"] for one in logged()} == {"9e24b553", "f397f260"}


def test_the_measurement_sees_hits(server: Live, tmp_path: Path) -> None:
    """How many tokens were cached, and not how long it took: that is the machine's affair."""
    file = tmp_path / "tenants.json"
    words = ["tenants", "--url", server.url, "--rounds", "4", "--words", "20", "--json", str(file)]
    done = CliRunner().invoke(app, [*words, "--key", KEYS[0], "--key", KEYS[1]])
    assert done.exit_code == 0, done.output
    report = Report.read(file)
    assert [row["prompt"] for row in report.rows] == list(KINDS)
    assert report.workload["prompt_tokens"] == (tokens := 20 * 7 - 1)  # a token for each byte
    assert {row["requests"] for row in report.rows} == {4}
    cached = {str(row["prompt"]): int(row["cached_tokens_max"] or 0) for row in report.rows}
    assert cached.pop(KINDS[2]) == tokens - 1
    assert max(cached.values()) < 4  # the first letters of a word may be those of another's
    assert all(cell for row in report.cells()[2:] for cell in row)


def test_a_server_that_is_not_there_or_refuses(server: Live) -> None:
    for url, keys, told in (
        (server.url, ["x", "y"], "answers 401"),
        ("http://127.0.0.1:9", ["x", "y"], "http://127.0.0.1:9 does not answer"),
        ("localhost:3000", ["x", "y"], "give the server's address"),
        (server.url, ["x"], "1 API keys are given, and two are compared"),
        (server.url, ["x", "x"], "1 API keys are given, and two are compared"),
    ):
        done = CliRunner().invoke(app, ["tenants", "--url", url, *np.ravel([["--key", key] for key in keys]).tolist()])
        assert told in str(done.exception)
