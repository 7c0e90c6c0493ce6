"""The suite as a pytest class: third parties subclass it. Only a test run needs pytest."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from octavo.attention.contract import AttentionBackend
from octavo.attention.device import CPU, Device
from octavo.conformance.registry import Trial, trials
from octavo.conformance.runner import one_thread
from octavo.conformance.truth import Fault

if TYPE_CHECKING:
    import pytest


class Suite:
    """Every trial of one backend as a test of its own.

        class TestMine(octavo.conformance.Suite):
            backend = MyBackend

    Trials are skipped with the reason where `probe` gives one.
    """

    backend: ClassVar[type[AttentionBackend]]
    device: ClassVar[type[Device]] = CPU
    """Where to run."""
    seed: ClassVar[int] = 0
    left_out: ClassVar[Collection[str]] = ()
    """Cases that take too long here, such as `generation` on an emulated chip."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each trial; pytest calls this."""
        if "trial" in metafunc.fixturenames:
            tried = trials(self.backend, self.device(), seed=self.seed)
            metafunc.parametrize("trial", [one for one in tried if one.case.name not in self.left_out], ids=str)

    def test_conformance(self, trial: Trial) -> None:
        """The backend passes the trial."""
        import pytest

        reason = self.backend.probe(trial.device)
        if reason is not None:
            pytest.skip(reason)
        try:
            with one_thread():
                trial.case.play(trial.stage())
        except Fault as fault:
            pytest.fail(f"{trial.case.meaning} {fault}", pytrace=False)
