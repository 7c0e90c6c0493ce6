"""The server that most tests of this folder share: a tiny Llama, settings at their defaults."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import checkpoints
from tests.engine.harness import load_reference
from tests.server.live import Live, live


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


@pytest.fixture
def http(server: Live) -> Iterator[httpx.Client]:
    """Speaks to the shared server; afterwards nothing may be left in its engine."""
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
    assert server.held() == (0, 0)
    assert server.service.admission.taken == 0
