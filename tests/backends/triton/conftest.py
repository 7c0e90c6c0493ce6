from collections.abc import Iterator

import pytest

from octavo_triton import launch
from tests.backends.triton.interpreter import interpreted


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes its time for each program: let one write many tokens."""
    monkeypatch.setattr(launch, "_WRITTEN", 256)
    with interpreted():
        yield
