"""The settings of the HTTP server: a part of `octavo.settings.Settings`, which reads and checks them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from octavo.settings.group import SettingsGroup, Texts


class Server(SettingsGroup):
    """Where it listens."""

    group = "Server"

    host: str = Field("0.0.0.0", description="Address to listen on. 127.0.0.1: this machine alone.")
    port: int = Field(3000, ge=0, le=65535, description="Port to listen on; 0: one that is free.")
    ui: bool = Field(True, description="Serve the page at /ui: a chat, and a look at the blocks of the cache.")
    validation_workers: PositiveInt = Field(2, description="Threads that turn text into tokens.")


class Limits(SettingsGroup):
    """What it takes on."""

    group = "Limits"

    max_input_tokens: PositiveInt | None = Field(
        None,
        description="Longest prompt, tokens. Unset: one less than max_total_tokens.",
    )
    max_total_tokens: PositiveInt | None = Field(
        None,
        description="Most tokens of one request, prompt and answer. Unset: what the model and the cache allow.",
    )
    max_concurrent_requests: PositiveInt = Field(
        128,
        description="Sequences in the server at once, waiting ones too; what is above is turned away with 429.",
    )
    max_client_batch_size: PositiveInt = Field(4, description="Most prompts of one /v1/completions request.")
    max_best_of: PositiveInt = Field(2, description="Most sequences that one prompt may ask for (best_of, n).")
    max_stop_sequences: NonNegativeInt = Field(4, description="Most stop texts of a request.")
    max_top_n_tokens: NonNegativeInt = Field(5, description="Most likeliest tokens to return at each place.")
    payload_limit: PositiveInt = Field(2_000_000, description="Most bytes of a request's body.")
    request_timeout: PositiveFloat | None = Field(
        None,
        description="Seconds until a request must be answered; X-Request-Timeout asks for less. Unset: no limit.",
    )
    max_queue_seconds: PositiveFloat | None = Field(
        None,
        description="Seconds that a request may wait until the engine begins to run it; then it is turned away with "
        "429. A stream's status waits as long. Unset: no limit.",
    )


def _printable(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Keys that can stand in a header. The message keeps them to itself."""
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError("an API key is made of printable ASCII characters without spaces: one of these is not")
    return keys


class Security(SettingsGroup):
    """Who may ask."""

    group = "Security"

    api_key: Annotated[Texts, AfterValidator(_printable)] = Field(
        (),
        description="Keys, with commas; requests bring one of them (Authorization: Bearer KEY), and each is a tenant "
        "with cached prefixes of its own; /metrics takes the first. Unset: open to all.",
    )
    cors_allow_origin: Texts = Field((), description="Origins whose pages may call the server, with commas; *: any.")


class Lifecycle(SettingsGroup):
    """How it ends, and what happens when its engine does."""

    group = "Lifecycle"

    graceful_termination_timeout: NonNegativeFloat = Field(
        90.0,
        description="Seconds that running requests have to finish after SIGTERM.",
    )
    engine_restarts: NonNegativeInt = Field(
        5,
        description="How often in a row the server starts its engine again when the engine's process dies.",
    )
    engine_restart_seconds: NonNegativeFloat = Field(
        1.0,
        description="How long the server waits before it does so; twice as long each further time, a minute at most.",
    )


def _traceable(endpoint: str) -> str:
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError("it must begin with http:// or https://, as in http://localhost:4318 (OTLP over HTTP)")
    try:
        installed = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of a part that it stands in
        installed = False
    if not installed:
        raise ValueError("traces need OpenTelemetry: pip install 'octavo[otel]'")
    return endpoint


class Logging(SettingsGroup):
    """What it tells."""

    group = "Logging"

    json_output: bool = Field(False, description="Write the log as JSON, one object a line.")
    otlp_endpoint: Annotated[str, AfterValidator(_traceable)] | None = Field(
        None,
        description="OpenTelemetry collector to send traces to, e.g. http://localhost:4318. Unset: no traces. "
        "For octavo.LLM the variable alone counts.",
    )
    otlp_service_name: str | None = Field(
        None,
        description="The name of this service in its traces. Unset: OTEL_SERVICE_NAME, or octavo.",
    )
