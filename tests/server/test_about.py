"""Health, info, tokens of a text, metrics, request ids, and a description that says what is there."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.logs import JsonLines
from octavo.server.logs import traceparent
from tests.checkpoints import byte_tokenizer
from tests.server.live import Live, until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GENERATE = {"inputs": "A page table", "parameters": {"max_new_tokens": 3}}


def test_health(http: httpx.Client) -> None:
    for route in ("/health", "/ping", "/"):
        for response in (http.get(route), http.head(route)):
            assert (response.status_code, response.content) == (200, b"")


def test_info(http: httpx.Client, server: Live) -> None:
    info = http.get("/info").json()
    assert info["model_id"] == server.service.model
    assert (info["max_concurrent_requests"], info["max_best_of"], info["max_input_tokens"]) == (128, 2, 1023)
    assert info["attention"] in {one["name"] for one in info["selection"]["candidates"]}
    assert info["chat_template"] is True


def test_info_says_what_memory_is_for(http: httpx.Client, server: Live, folder: Path) -> None:
    info = http.get("/info").json()
    layers, heads, size = 3, 2, 16
    block = info["block_size"] * layers * heads * size * 2 * 4
    assert info["cache_bytes"] == (info["max_batch_total_tokens"] // info["block_size"] + 1) * block
    assert info["weight_bytes"] > 0.9 * (folder / "model.safetensors").stat().st_size
    assert info["workspace_bytes"] == 0
    assert info["activation_bytes"] > 0
    assert info["graph_bytes"] == 0


def test_tokens_of_a_text(http: httpx.Client) -> None:
    text = "Tür 7 日"
    tokens = http.post("/tokenize", json={"inputs": text}).json()
    assert [token["id"] for token in tokens] == byte_tokenizer().encode(text)
    assert {text[token["start"] : token["stop"]] for token in tokens} == set(text)
    assert all(token["text"] == text[token["start"] : token["stop"]] for token in tokens)


def test_tokens_of_a_chat(http: httpx.Client) -> None:
    answer = http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert answer["templated_text"] == "user: Hi\nassistant:"
    assert [token["text"] for token in answer["tokenize_response"]] == list("user: Hi\nassistant:")
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    again = http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": parts}]}).json()
    assert again == answer


def samples(http: httpx.Client) -> dict[str, float]:
    """Values by name and labels."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        sample.name + "".join(f",{name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def grown(http: httpx.Client, before: dict[str, float], name: str) -> float:
    return samples(http).get(name, 0) - before.get(name, 0)


def test_metrics_count_requests(http: httpx.Client) -> None:
    before = samples(http)
    http.post("/generate", json=GENERATE)
    http.post("/v1/chat/completions", json={"messages": [{"role": "u", "content": "x" * 99}], "max_tokens": 3})
    http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "stream": True})
    http.post("/generate", json={"inputs": "a" * 2000})
    assert grown(http, before, "tgi_request_count") == 4
    assert grown(http, before, "tgi_request_success") == 3
    assert grown(http, before, "tgi_request_failure,err=validation") == 1
    for name in ("duration", "validation_duration", "queue_duration", "inference_duration", "generated_tokens",
                 "input_length", "max_new_tokens", "mean_time_per_token_duration"):  # fmt: skip
        assert grown(http, before, f"tgi_request_{name}_count") == 3
    assert grown(http, before, "octavo_time_to_first_token_seconds_count") == 3
    assert grown(http, before, "octavo_time_per_output_token_seconds_count") == 3
    assert grown(http, before, "octavo_generated_tokens_total") == 9
    assert grown(http, before, "octavo_prompt_tokens_total") == len("A page table") + len("abc") + len(
        "u: " + "x" * 99 + "\nassistant:"
    )


def test_metrics_of_the_engine(http: httpx.Client, server: Live) -> None:
    before = samples(http)
    prompt = {"prompt": "metrics count this prompt", "max_tokens": 4}
    for _ in range(2):
        http.post("/v1/completions", json=prompt)
    now = samples(http)
    info = server.service.engine.info
    blocks = {state: now[f"octavo_blocks,state={state}"] for state in ("free", "cached", "held", "pinned")}
    assert blocks["free"] + blocks["cached"] == info.num_blocks
    assert (blocks["held"], blocks["pinned"], now["octavo_engine_up"]) == (0, 0, 1)
    assert (now["tgi_queue_size"], now["tgi_batch_current_size"]) == (0, 0)
    assert now["tgi_batch_max_total_tokens"] == info.max_batch_total_tokens
    assert now["octavo_cached_tokens_total"] - before["octavo_cached_tokens_total"] == len(prompt["prompt"]) - 1  # type: ignore[arg-type]
    assert 0 < now["octavo_cache_hit_rate"] < 1
    for name in ("tgi_batch_inference_count,method=decode", "tgi_batch_forward_duration_count,method=prefill",
                 "octavo_step_seconds_count", "tgi_batch_next_size_count",
                 "octavo_step_tokens_sum,phase=decode"):  # fmt: skip
        assert now[name] > before.get(name, 0)


def test_request_ids(http: httpx.Client) -> None:
    asked = http.get("/info", headers={"X-Request-Id": "trace-7"})
    assert asked.headers["x-request-id"] == "trace-7"
    for bad in ("", "a b", "x" * 129, "<script>"):
        own = http.get("/info", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", own)
    refused = http.post("/generate", json={}, headers={"X-Request-Id": "trace-8"})
    assert refused.headers["x-request-id"] == "trace-8"
    chat = {"messages": [{"role": "u", "content": "a"}], "max_tokens": 1}
    assert http.post("/v1/chat/completions", json=chat, headers={"X-Request-Id": "t9"}).json()["id"] == "chatcmpl-t9"


def test_a_line_of_the_log(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo.server.requests"):
        trace = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-00"}
        http.post("/generate", json=GENERATE, headers={"X-Request-Id": "logged"} | trace)

    def logged() -> list[logging.LogRecord]:  # the answer may be here before its line is
        return [one for one in caplog.records if getattr(one, "fields", {}).get("request_id") == "logged"]

    with caplog.at_level(logging.INFO, "octavo.server.requests"):
        until(lambda: bool(logged() or http.get("/health").is_error))
    (record,) = logged()
    line = json.loads(JsonLines().format(record))
    assert (line["method"], line["path"], line["status"], line["level"]) == ("POST", "/generate", 200, "INFO")
    assert (line["prompt_tokens"], line["generated_tokens"]) == (12, 3)
    assert 0 < line["validation_seconds"] <= line["first_token_seconds"] <= line["seconds"]
    assert 0 <= line["queue_seconds"] <= line["seconds"]
    assert line["trace_id"] == TRACE
    assert "tenant" not in line
    assert line["message"].startswith("POST /generate 200 in ")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([f"00-{TRACE}-00f067aa0ba902b7-01"], f"00-{TRACE}-00f067aa0ba902b7-01"),
        ([f" 00-{TRACE}-00f067aa0ba902b7-01\t"], f"00-{TRACE}-00f067aa0ba902b7-01"),
        ([f"cc-{TRACE}-00f067aa0ba902b7-01-what-comes"], f"cc-{TRACE}-00f067aa0ba902b7-01"),
        ([f"cc-{TRACE}-00f067aa0ba902b7-01.what-comes"], ""),
        ([f"00-{TRACE}-00f067aa0ba902b7-01-what-comes"], ""),
        ([f"ff-{TRACE}-00f067aa0ba902b7-01"], ""),
        ([f"00-{TRACE.upper()}-00f067aa0ba902b7-01"], ""),
        ([f"00-{TRACE[1:]}-00f067aa0ba902b7-01"], ""),
        ([f"00-{'0' * 32}-00f067aa0ba902b7-01"], ""),
        ([f"00-{TRACE}-{'0' * 16}-01"], ""),
        ([f"00-{TRACE}-00f067aa0ba902b7-1"], ""),
        ([f"00-{TRACE}-00f067aa0ba902b7-01"] * 2, ""),
        ([""], ""),
        ([], ""),
    ],
)
def test_traceparents(given: list[str], kept: str) -> None:
    """By the rules, and the examples, of W3C Trace Context."""
    assert traceparent(given) == kept


def test_the_description_is_whole(http: httpx.Client) -> None:
    """Every reference resolves, every route that generates says all its errors, and /docs is there."""
    described = http.get("/openapi.json").json()
    known = {f"#/components/schemas/{name}" for name in described["components"]["schemas"]}
    assert set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(described))) <= known
    for path in ("/generate", "/generate_stream", "/", "/v1/completions", "/v1/chat/completions"):
        told = described["paths"][path]["post"]["responses"]
        assert told.keys() == {"200", "400", "401", "408", "413", "422", "424", "429", "500", "503", "504"}
        name = "OpenAIErrorBody" if path.startswith("/v1") else "ErrorBody"
        assert told["422"]["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
    assert "HTTPValidationError" not in described["components"]["schemas"]
    assert http.get("/docs").status_code == 200


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "a", "parameters": {"details": True, "max_new_tokens": 2, "top_n_tokens": 1}}),
    ("/", {"inputs": "a", "parameters": {"max_new_tokens": 2}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "u", "content": "a"}], "max_tokens": 2, "logprobs": True}),
    ("/tokenize", {"inputs": "a"}),
    ("/chat_tokenize", {"messages": [{"role": "u", "content": "a"}]}),
    ("/generate", {"inputs": ""}),
    ("/v1/completions", {"prompt": ""}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_are_as_described(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    described = http.get("/openapi.json").json()
    response = http.post(path, json=body)
    schema = described["paths"][path]["post"]["responses"][str(response.status_code)]["content"]["application/json"]
    jsonschema.validate(response.json(), schema["schema"] | {"components": described["components"]})
