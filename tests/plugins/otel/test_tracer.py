"""A summary becomes spans; a collector that is not there costs nothing but them."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from octavo.hooks import RequestSummary
from octavo_otel.tracer import Tracer
from tests.plugins.otel.collector import Collector, collecting

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REQUEST = RequestSummary(
    request_id=7,
    finish_reason="eos",
    prompt_tokens=20,
    cached_tokens=16,
    generated_tokens=5,
    preemptions=1,
    first_token_seconds=0.5,
    seconds=2.0,
    queue_seconds=0.125,
    label="r-1",
    trace=f"00-{TRACE}-{PARENT}-01",
)
SERVER, ERROR = 2, 2
"""A span's kind and its status, by the protocol's numbers."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture
def tracer(collector: Collector) -> Iterator[Tracer]:
    one = Tracer(collector.url, "demo")
    yield one
    one.provider.shutdown()


def test_a_request_and_its_phases(tracer: Tracer, collector: Collector) -> None:
    tracer.record(REQUEST)
    assert tracer.provider.force_flush()
    (request,) = collector.requests()
    assert collector.paths == ["/v1/traces"]
    assert (request.name, request.trace, request.parent, request.kind) == (
        "text_completion demo", TRACE, PARENT, SERVER,
    )  # fmt: skip
    assert request.end - request.start == 2_000_000_000
    phases = collector.phases(request)
    assert [one.name for one in phases] == ["queue", "prefill", "decode"]
    assert [one.end - one.start for one in phases] == [125_000_000, 375_000_000, 1_500_000_000]
    assert [one.start for one in phases] == [request.start, phases[0].end, phases[1].end]
    assert request.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 5,
        "octavo.sequence": 7,
        "octavo.preemptions": 1,
        "octavo.request_id": "r-1",
        "octavo.first_token_seconds": 0.5,
    }


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"queue_seconds": None, "first_token_seconds": None, "finish_reason": "cancelled"}, ["queue"]),
        ({"first_token_seconds": None, "finish_reason": "error"}, ["queue", "prefill"]),
    ],
)
def test_a_request_that_did_not_come_so_far(
    tracer: Tracer, collector: Collector, changes: dict[str, Any], names: list[str]
) -> None:
    tracer.record(replace(REQUEST, **changes))
    tracer.provider.force_flush()
    (request,) = collector.requests()
    phases = collector.phases(request)
    assert [one.name for one in phases] == names
    assert phases[-1].end == request.end
    failed = changes["finish_reason"] == "error"
    assert (request.status == ERROR, request.attributes.get("error.type")) == (failed, "generation" if failed else None)


@pytest.mark.parametrize(
    "trace",
    ["", "no trace", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE.upper()}-{PARENT}-01"],
)
def test_without_a_trace_it_begins_one(tracer: Tracer, collector: Collector, trace: str) -> None:
    tracer.record(replace(REQUEST, trace=trace))
    tracer.provider.force_flush()
    (request,) = collector.requests()
    assert request.parent == ""
    assert request.trace not in (TRACE, "0" * 32)


def test_a_trace_that_is_not_sampled_is_not_recorded(tracer: Tracer, collector: Collector) -> None:
    for flags in ("00", "02"):
        tracer.record(replace(REQUEST, trace=f"00-{TRACE}-{PARENT}-{flags}"))
    tracer.record(replace(REQUEST, trace=f"00-{TRACE}-{PARENT}-03"))
    tracer.provider.force_flush()
    assert len(collector.requests()) == 1


def test_opentelemetrys_own_variables(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=by-attribute")
    named = {}
    for variable, name in ((None, None), ("by-variable", None), ("by-variable", "by-setting")):
        if variable is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", variable)
        tracer = Tracer(collector.url + "/v1/traces", "demo", name)
        tracer.record(REQUEST)
        tracer.provider.shutdown()
        named[variable, name] = collector.requests()[-1].resource
    assert [one["service.name"] for one in named.values()] == ["by-attribute", "by-variable", "by-setting"]
    assert all(one["deployment.environment"] == "test" for one in named.values())
    assert set(collector.paths) == {"/v1/traces"}


def test_a_collector_that_goes_and_comes_is_told_once_each(
    tracer: Tracer, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for status in (200, 401, 500, 401, 200, 200, 401):
            collector.status = status
            tracer.record(REQUEST)
            tracer.provider.force_flush()
    told = [(one.levelname, one.getMessage()) for one in caplog.records if "v1/traces" in one.getMessage()]
    told = [one for one in told if one[0] != "DEBUG"]  # of the HTTP library
    url = f"{collector.url}/v1/traces"
    assert [level for level, _ in told] == ["WARNING", "INFO", "WARNING"]
    assert told[0][1].startswith(f"{url} takes no traces, they are dropped until it does: ")
    assert "401" in told[0][1]
    assert told[1][1] == f"{url} takes traces again"
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]
    assert len(collector.requests()) == 3


AT_EXIT = """
import sys
from octavo_otel.tracer import Tracer
from tests.plugins.otel.test_tracer import REQUEST
tracer = Tracer(sys.argv[1], "demo")
for _ in range(3000):  # more than the queue holds: nothing waits for room
    tracer.record(REQUEST)
"""


def ended(url: str) -> str:
    """What a process says that makes spans and ends."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OTEL_BSP_MAX_QUEUE_SIZE": "600",
    }
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, url], env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=True
    )
    return done.stderr


def test_the_last_spans_are_sent_at_the_end(collector: Collector) -> None:
    assert ended(collector.url) == ""
    assert len(collector.spans) >= 600


def test_a_collector_that_never_answers_holds_up_no_end() -> None:
    """It takes the connection and is silent; the exporter alone would wait for it for half a minute and more."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert ended(f"http://127.0.0.1:{silent.getsockname()[1]}") == ""


def test_unset_nothing_of_it_is_imported() -> None:
    check = "import octavo_otel.plugin, sys; octavo_otel.plugin.octavo_request_finished(None)"
    check += "; sys.exit('opentelemetry' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "OTLP_ENDPOINT"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-W", "error", "-c", check], env=environment, check=True)
