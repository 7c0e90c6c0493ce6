"""What dashboards ask for is there: octavo's own, and that of TGI."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from octavo.async_engine import EngineStats
from octavo.server.metrics import Metrics
from tests.engine.test_wire import STEP
from tests.server.live import Live

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs/grafana/octavo.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

OF_TGI = {
    "tgi_batch_current_max_tokens", "tgi_batch_current_size", "tgi_batch_forward_duration_bucket",
    "tgi_batch_inference_duration_bucket", "tgi_queue_size", "tgi_request_count", "tgi_request_duration_bucket",
    "tgi_request_failure", "tgi_request_generated_tokens_bucket", "tgi_request_generated_tokens_count",
    "tgi_request_generated_tokens_sum", "tgi_request_input_length_bucket",
    "tgi_request_mean_time_per_token_duration_bucket", "tgi_request_queue_duration_bucket", "tgi_request_success",
}  # fmt: skip
"""What the dashboard in text-generation-inference's own repository asks for ..."""
GONE = {
    "tgi_batch_concat", "tgi_batch_concat_duration", "tgi_batch_decode_duration", "tgi_batch_filter_duration",
    "tgi_request_skipped_tokens",
}  # fmt: skip
"""... and what it asks for of parts that octavo does not have."""


@pytest.fixture
def exposed(http: httpx.Client) -> dict[str, list[dict[str, str]]]:
    """The labels of each sample, by name, after a request that was answered."""
    http.post("/generate", json={"inputs": "A page table", "parameters": {"max_new_tokens": 3}})
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_families(http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def selectors(panel: dict[str, Any]) -> Iterator[promql_parser.VectorSelector]:
    """What a panel selects, by Prometheus' own grammar."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    for target in panel["targets"]:
        promql_parser.walk(promql_parser.parse(target["expr"].replace("$__rate_interval", "5m")), visit)
    yield from found


def test_the_dashboard_asks_for_what_is_there(exposed: dict[str, list[dict[str, str]]]) -> None:
    for panel in PANELS:
        for selector in selectors(panel):
            assert selector.name in exposed, panel["title"]
            matchers = {one.name: one for one in selector.matchers.matchers}
            assert matchers.pop("instance").value == "$instance"
            for name, matcher in matchers.items():
                have = {labels[name] for labels in exposed[selector.name]}
                assert set(matcher.value.split("|")) <= have, panel["title"]


def test_the_dashboard_leaves_nothing_out(http: httpx.Client) -> None:
    shown = {selector.name for panel in PANELS for selector in selectors(panel)}
    own = [family for family in text_families(http.get("/metrics").text) if family.name.startswith("octavo_")]
    assert len(own) > 10
    assert [family.name for family in own if shown.isdisjoint(sample.name for sample in family.samples)] == []


def test_the_dashboard_can_be_drawn() -> None:
    places = [(panel["gridPos"], panel["title"]) for panel in DASHBOARD["panels"]]
    taken = [
        (x, y) for place, _ in places
        for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    ]  # fmt: skip
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24
    assert all(above[0]["y"] <= below[0]["y"] for above, below in pairwise(places))
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    variables = {one["name"]: one["type"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    asked = [one["datasource"]["uid"] for panel in PANELS for one in (panel, *panel["targets"])]
    assert set(asked) == {"${datasource}"}


def test_the_dashboard_of_tgi(exposed: dict[str, list[dict[str, str]]]) -> None:
    assert exposed.keys() >= OF_TGI
    methods = {labels["method"] for labels in exposed["tgi_batch_inference_duration_bucket"]}
    assert methods == {"prefill", "decode"}
    migrating = (Path(__file__).parents[2] / "docs/migrate-from-tgi.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in migrating for name in GONE)
    assert not {name for name in exposed if any(name.startswith(gone) for gone in GONE)}


def test_both_of_prometheus_formats(http: httpx.Client) -> None:
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    told = http.get("/metrics", headers={"Accept": accept})
    assert told.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    modern = {sample.name for family in open_families(told.text) for sample in family.samples}  # type: ignore[no-untyped-call]
    told = http.get("/metrics")
    assert told.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_families(told.text))
    assert {sample.name for family in families for sample in family.samples} == modern
    assert all(family.documentation for family in families)
    assert len({family.name for family in families}) == len(families)


def test_counters_go_on_when_the_engine_begins_anew(server: Live) -> None:
    metrics = Metrics(server.service.engine.info)
    for evicted in (2, 0, 1):
        metrics.observe_step(replace(STEP, evicted_blocks=evicted))
    text, _ = metrics.text(EngineStats(), healthy=True)
    assert b"octavo_blocks_evicted_total 3.0" in text


def test_counters_are_there_before_they_count(http: httpx.Client) -> None:
    """A counter that comes with its first increment had no increase, for Prometheus."""
    text = http.get("/metrics").text
    for kind in ("validation", "overloaded", "timeout", "dropped", "engine_died"):
        assert f'tgi_request_failure{{err="{kind}"}}' in text
