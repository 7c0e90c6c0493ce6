"""What Prometheus sees: TGI's names, so that its dashboards go on working, and octavo's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo.hooks import StepStats
from octavo.server import errors
from octavo.server.limits import Deadline
from octavo.server.meter import Meter

if TYPE_CHECKING:
    from octavo.async_engine import EngineInfo, EngineStats

SECONDS = [0.0001 * 1.5**power for power in range(35)]
SIZES = [2**power for power in range(11)]
FAILURES = (
    "validation", "template", "overloaded", "generation", "timeout", "queue_timeout", "dropped", "draining",
    "engine_died", "internal",
)  # fmt: skip
"""Why requests fail: TGI's label `err`."""


class PlainCounters(Collector):
    """Counters under names as they are: the client library would add `_total`, and TGI's dashboards would be empty."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        registry.register(self)

    def add(self, name: str, count: int = 1, **labels: str) -> None:
        """So many more; 0 lets it be seen before there is one, without which the first is no increase."""
        key = name, tuple(labels.items())
        self._values[key] = self._values.get(key, 0) + count

    def collect(self) -> Iterator[Metric]:
        """The counters, for the registry."""
        metrics: dict[str, Metric] = {}
        for (name, labels), value in self._values.items():
            metric = metrics.setdefault(name, Metric(name, "As in text-generation-inference.", "unknown"))
            metric.add_sample(name, dict(labels), value)
        yield from metrics.values()


class Metrics:
    """All of one server's."""

    def __init__(self, info: EngineInfo) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        self.counts = PlainCounters(registry)
        for name in ("tgi_request_count", "tgi_request_success"):
            self.counts.add(name, 0)
        for kind in FAILURES:
            self.counts.add("tgi_request_failure", 0, err=kind)
        self._block_size = info.block_size

        def seconds(name: str, help: str, *labels: str) -> Histogram:
            return Histogram(name, help, labels, registry=registry, buckets=SECONDS)

        def tokens(name: str, help: str, most: int) -> Histogram:
            bounds = sorted({max(1, round(most * part / 100)) for part in range(1, 101)})
            return Histogram(name, help, registry=registry, buckets=bounds)

        def counter(name: str, help: str) -> Counter:
            return Counter(name, help, registry=registry)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(name, help, labels, registry=registry)

        self.duration = seconds("tgi_request_duration", "Seconds from a request's arrival to its end.")
        self.validation = seconds("tgi_request_validation_duration", "Seconds for checks and tokenizing.")
        self.queue = seconds("tgi_request_queue_duration", "Seconds in the engine's queue.")
        self.inference = seconds("tgi_request_inference_duration", "Seconds from the queue to the last token.")
        self.per_token = seconds("tgi_request_mean_time_per_token_duration", "Inference seconds for each token.")
        self.generated = tokens("tgi_request_generated_tokens", "Tokens generated.", info.max_total_tokens)
        self.input_length = tokens("tgi_request_input_length", "Tokens of the prompt.", info.max_input_tokens)
        self.max_new = tokens("tgi_request_max_new_tokens", "Tokens asked for at most.", info.max_total_tokens)
        self.forward = seconds("tgi_batch_forward_duration", "Seconds of a step.", "method")
        self.batch_inference = seconds("tgi_batch_inference_duration", "Seconds of a step.", "method")
        self.next_size = Histogram("tgi_batch_next_size", "Requests in a step.", registry=registry, buckets=SIZES)
        self.queue_size = gauge("tgi_queue_size", "Requests that wait.")
        self.batch_size = gauge("tgi_batch_current_size", "Requests that run.")
        self.batch_tokens = gauge("tgi_batch_current_max_tokens", "Tokens that the blocks of running requests hold.")
        self.total_tokens = gauge("tgi_batch_max_total_tokens", "Tokens that the cache holds.")
        self.total_tokens.set(info.max_batch_total_tokens)

        self.prompt_tokens = counter("octavo_prompt_tokens", "Prompt tokens of requests that were served.")
        self.cached_tokens = counter("octavo_cached_tokens", "Those of them found in the cache.")
        self.generated_tokens = counter("octavo_generated_tokens", "Tokens generated.")
        self.hit_rate = gauge(
            "octavo_cache_hit_rate", "Share of looked-up prompt tokens that were cached, since the engine's start."
        )
        self.preemptions = counter("octavo_preemptions", "Times that a running request lost its blocks.")
        self.blocks = gauge("octavo_blocks", "Blocks of the cache.", "state")
        self.evicted = counter("octavo_blocks_evicted", "Blocks taken from the prefix tree for those that need them.")
        self.up = gauge("octavo_engine_up", "1 while the engine serves.")
        self.step = seconds("octavo_step_seconds", "Seconds of a step, from scheduling to sampled tokens.")
        self.step_tokens = Histogram(
            "octavo_step_tokens",
            "Tokens computed in a step.",
            ["phase"],
            registry=registry,
            buckets=[*SIZES, 2048, 4096],
        )
        self.first_token = seconds("octavo_time_to_first_token_seconds", "Seconds from arrival to the first token.")
        self.per_output = seconds("octavo_time_per_output_token_seconds", "Mean seconds between an answer's tokens.")

    @contextmanager
    def request(self, meter: Meter, deadline: Deadline) -> Iterator[None]:
        """Count one request, and how it ends."""
        self.counts.add("tgi_request_count")
        try:
            yield
        except Exception as error:
            self.counts.add("tgi_request_failure", err=_kind(error))
            raise
        except BaseException:  # cancelled: its time is over, or its client is gone
            self.counts.add("tgi_request_failure", err="timeout" if deadline.passed else "dropped")
            raise
        self.counts.add("tgi_request_success")
        self._observe(meter)

    def _observe(self, meter: Meter) -> None:
        meter.end()
        self.duration.observe(meter.total)
        self.validation.observe(meter.validation)
        self.queue.observe(meter.queue)
        self.inference.observe(meter.inference)
        self.per_token.observe(meter.per_token)
        self.generated.observe(meter.generated_tokens)
        self.input_length.observe(meter.prompt_tokens)
        if meter.max_new_tokens is not None:
            self.max_new.observe(meter.max_new_tokens)
        self.first_token.observe(meter.first_token)
        if (pace := meter.per_output_token) is not None:
            self.per_output.observe(pace)
        self.prompt_tokens.inc(meter.prompt_tokens)
        self.cached_tokens.inc(meter.cached_tokens)
        self.generated_tokens.inc(meter.generated_tokens)

    def observe_step(self, step: StepStats) -> None:
        """The engine has made a step."""
        method = "prefill" if step.prefill_tokens else "decode"
        self.counts.add("tgi_batch_inference_count", method=method)
        self.counts.add("tgi_batch_inference_success", method=method)
        self.forward.labels(method).observe(step.seconds)
        self.batch_inference.labels(method).observe(step.seconds)
        self.next_size.observe(step.running)
        self.step.observe(step.seconds)
        self.step_tokens.labels("prefill").observe(step.prefill_tokens)
        self.step_tokens.labels("decode").observe(step.decode_tokens)
        self.preemptions.inc(step.preempted)
        self.evicted.inc(step.evicted_blocks)

    def text(self, stats: EngineStats, healthy: bool, accept: str = "") -> tuple[bytes, str]:
        """Everything, in the one of Prometheus' formats that an Accept header asks for, and its media type."""
        self.up.set(healthy)
        self.queue_size.set(stats.waiting)
        self.batch_size.set(stats.running)
        self.batch_tokens.set(stats.blocks_held * self._block_size)
        for state in ("free", "cached", "held", "pinned"):
            self.blocks.labels(state).set(getattr(stats, f"blocks_{state}"))
        self.hit_rate.set(stats.hit_tokens / stats.queried_tokens if stats.queried_tokens else 0)
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type


def _kind(error: Exception) -> str:
    """TGI's label of a failure."""
    known = errors.of_engine(error)
    return "internal" if known is None else {"template_error": "template"}.get(known.kind, known.kind)
