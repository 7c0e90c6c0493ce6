from collections.abc import Iterator

import pytest

import octavo_triton.kernels  # noqa: F401
from tests.backends.triton.interpreter import interpreted


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with interpreted():
        yield
