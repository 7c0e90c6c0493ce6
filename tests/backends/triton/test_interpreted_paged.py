"""The packed layout in Triton's interpreter: conformance."""

from typing import ClassVar

from octavo.attention.contract import AttentionBackend
from octavo.conformance import Suite
from tests.backends.triton.interpreted import Paged


class TestPaged(Suite):
    backend: ClassVar[type[AttentionBackend]] = Paged
    left_out = ("generation",)
