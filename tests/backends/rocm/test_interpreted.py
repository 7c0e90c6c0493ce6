"""The ROCm backends' own tiles in Triton's interpreter, by the conformance suite, on a machine without a GPU.

The cases that tiles, dtypes and layouts bear on; tests/backends/triton has them all, for the kernels that chips share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from octavo.attention.contract import AttentionBackend
from octavo.conformance import Suite
from octavo.conformance.registry import CASES
from octavo_triton import launch
from tests.backends.rocm.interpreted import OnMI300X, OnRadeon
from tests.backends.triton.interpreter import interpreted

# A capped logit of 1e5 has an infinite exponential, as the kernels mean it to have: numpy warns of it, a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "_WRITTEN", 256)
    with interpreted():
        yield


class TestOnMI300X(Suite):
    backend: ClassVar[type[AttentionBackend]] = OnMI300X
    left_out = CASES.keys() - {"features", "fp8-scales"}


class TestOnRadeon(Suite):
    backend: ClassVar[type[AttentionBackend]] = OnRadeon
    left_out = CASES.keys() - {"mixed", "block-sizes"}
