"""The stand-in takes what FlashInfer takes; looked at wherever that is installed."""

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.plugins.flashinfer import library


def functions(kind: Callable[..., object]) -> Iterator[tuple[str, Callable[..., object]]]:
    if not inspect.isclass(kind):
        yield kind.__name__, kind
    else:
        yield from ((name, getattr(kind, name)) for name in ("__init__", "plan", "run", "reset_workspace_buffer"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", library.CALLED, ids=lambda kind: kind.__name__)
def test_signatures_are_flashinfers(kind: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    if find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    theirs = getattr(import_module("flashinfer"), kind.__name__)
    for (name, ours), (_, other) in zip(functions(kind), functions(theirs), strict=True):
        assert _arguments(ours) == _arguments(other), name


def _arguments(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults in their order."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]
