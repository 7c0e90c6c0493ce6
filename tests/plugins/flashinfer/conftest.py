"""FlashInfer's stand-in, for as long as a test runs."""

import sys
from collections.abc import Iterator

import pytest

import octavo_flashinfer
from tests.plugins.flashinfer import library


@pytest.fixture(autouse=True)
def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flashinfer", library.module())
    _forget()
    library.Wrapper.made.clear()
    yield
    _forget()


def _forget() -> None:
    """What was imported with one stand-in is not for another, nor for FlashInfer itself."""
    sys.modules.pop("octavo_flashinfer.wrappers", None)
    vars(octavo_flashinfer).pop("wrappers", None)
