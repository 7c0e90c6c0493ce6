"""From a client's traceparent to a span below its own, through the server and the engine's process."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.settings import Settings, SettingsError
from octavo_otel.tracer import OPERATION
from tests import checkpoints
from tests.checkpoints import EOS
from tests.plugins.otel.collector import Collector, Span, collecting
from tests.server.live import live, until

PARENT = "00f067aa0ba902b7"
CHAT: Any = {"messages": [{"role": "user", "content": "Where is block 7?"}], "max_tokens": 5}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def http(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server that traces, told so by an argument alone; its engine sends at once."""
    model = checkpoints.make("llama", tmp_path_factory.mktemp("traced"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with (
            live(model, otlp_endpoint=collector.url, otlp_service_name="mine") as server,
            httpx.Client(base_url=server.url, timeout=120) as client,
        ):
            yield client


def headers(number: int, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace(number)}-{PARENT}-{flags}"}


def trace(number: int) -> str:
    return f"{number:032x}"


def wait_for(collector: Collector, number: int, count: int = 1) -> list[Span]:
    """The spans of a request's sequences: a batch with a request's span has those of its phases too."""
    until(lambda: len(collector.requests(trace(number))) >= count)
    return collector.requests(trace(number))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_chat(http: httpx.Client, collector: Collector, streaming: bool) -> None:
    number, before = 1 + streaming, time.time_ns()
    asked = CHAT | ({"stream": True, "stream_options": {"include_usage": True}} if streaming else {})
    response = http.post("/v1/chat/completions", json=asked, headers=headers(number))
    after = time.time_ns()
    (span,) = wait_for(collector, number)
    assert (span.parent, span.resource["service.name"]) == (PARENT, "mine")
    assert span.name.startswith(f"{OPERATION} /")  # the model's folder
    assert span.attributes["octavo.request_id"] == response.headers["x-request-id"]
    if not streaming:
        usage = response.json()["usage"]
        assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 5
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == cached
    assert before <= span.start <= span.end <= after
    phases = collector.phases(span)
    assert [one.name for one in phases] == ["queue", "prefill", "decode"]
    assert (phases[0].start, phases[-1].end) == (span.start, span.end)
    assert all(one.trace == span.trace for one in phases)


def test_several_answers_are_a_span_each(http: httpx.Client, collector: Collector) -> None:
    asked = {"prompt": ["one", "two and more"], "max_tokens": 4, "n": 2}
    usage = http.post("/v1/completions", json=asked, headers=headers(10)).json()["usage"]
    spans = wait_for(collector, 10, 4)
    assert len({one.attributes["octavo.sequence"] for one in spans}) == 4
    assert {one.attributes["gen_ai.request.choice.count"] for one in spans} == {2}
    said = [
        (one.attributes["gen_ai.usage.input_tokens"], one.attributes["gen_ai.usage.output_tokens"]) for one in spans
    ]
    assert sum(output for _, output in said) == usage["completion_tokens"]
    assert sum(prompt for prompt, _ in said) == 2 * usage["prompt_tokens"]


def test_a_trace_that_is_not_sampled_and_one_that_is_none(http: httpx.Client, collector: Collector) -> None:
    known = len(collector.requests())
    http.post("/v1/chat/completions", json=CHAT, headers=headers(20, "00"))
    http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": "00-zz"})
    twice = [("traceparent", headers(21)["traceparent"])] * 2
    http.post("/v1/chat/completions", json=CHAT, headers=twice)
    until(lambda: len(collector.requests()) >= known + 2)
    http.post("/v1/chat/completions", json=CHAT, headers=headers(22))
    wait_for(collector, 22)  # spans come in order: what would have come is here
    roots = [one for one in collector.requests()[known:] if not one.parent]
    assert len(roots) == 2
    assert not collector.requests(trace(20))
    assert not collector.requests(trace(21))


def test_a_request_whose_client_goes(http: httpx.Client, collector: Collector) -> None:
    asked = {"prompt": "count", "max_tokens": 900, "stream": True, "logit_bias": {str(EOS): -100}}
    with http.stream("POST", "/v1/completions", json=asked, headers=headers(30)) as response:
        next(response.iter_lines())
    (span,) = wait_for(collector, 30)
    assert span.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(SettingsError, match=r"otlp_endpoint is 'localhost:4318' \(argument\): it must begin with http"):
        Settings(otlp_endpoint="localhost:4318")


@pytest.mark.parametrize("missing", [None, ModuleNotFoundError("No module named 'opentelemetry'")])
def test_without_the_extra_it_says_what_to_install(missing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        assert name.startswith("opentelemetry.")
        if missing is not None:
            raise missing

    monkeypatch.setattr("octavo.settings.server.find_spec", find_spec)
    monkeypatch.setenv("OTLP_ENDPOINT", "http://localhost:4318")
    with pytest.raises(SettingsError, match=r"variable OTLP_ENDPOINT\): traces need .* pip install 'octavo\[otel\]'"):
        Settings()
    monkeypatch.delenv("OTLP_ENDPOINT")
    assert Settings().otlp_endpoint is None
