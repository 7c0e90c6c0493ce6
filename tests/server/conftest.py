"""The server that most tests of this folder share: a tiny Llama, settings at their defaults."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import checkpoints
from tests.engine.harness import load_reference
from tests.server.live import ORIGIN, Live, live


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def reference(folder: Path) -> Any:
    """The same model as transformers runs it."""
    return load_reference(folder)


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Live]:
    with live(folder) as running:
        yield running


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with keys, few places, one sequence at a time, and prompts computed a little at a time."""
    with live(
        checkpoints.make("llama", tmp_path_factory.mktemp("long"), max_position_embeddings=32_768),
        max_batch_total_tokens=65_536,
        max_batch_prefill_tokens=16,
        api_key="first-key, second-key",
        cors_allow_origin=ORIGIN,
        max_concurrent_requests=2,
        max_batch_size=1,
        payload_limit=10_000,
        block_size=16,
        max_queue_seconds=3600,
    ) as running:
        yield running


@pytest.fixture
def http(server: Live) -> Iterator[httpx.Client]:
    """Speaks to the shared server; afterwards nothing may be left in its engine."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
    assert server.held() == (0, 0)
    assert server.service.admission.taken == 0
