"""The library where it is installed, and a stand-in anywhere."""

import pytest

from octavo_ipex import library
from tests.backends.ipex import stand_in, xpu_stand_in


@pytest.fixture
def on_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of both builds of the library."""
    monkeypatch.setattr(library, "operators", lambda build: xpu_stand_in if build.gpus else stand_in)
    monkeypatch.setattr(library, "fault", lambda build: None)


@pytest.fixture(params=["stand-in"] if library.fault(library.CPU) else ["stand-in", "library"])
def kernels(request: pytest.FixtureRequest) -> None:
    """Either, one after the other."""
    if request.param == "stand-in":
        request.getfixturevalue("on_stand_in")


@pytest.fixture(params=["AVX2", "AVX512"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What octavo takes this machine's for: which kernel is the faster one depends on it, never what is right."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: request.param)
    return str(request.param)
