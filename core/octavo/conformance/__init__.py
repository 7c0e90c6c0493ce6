"""The conformance suite: what every attention backend must pass.

Its truth is float64 attention over the unpaged history that a case keeps, so it shares no code with what it tests; its
caches start dirty. Run `octavo conformance NAME`, or subclass `Suite` in a test.
"""

from octavo.conformance import cases, generation, layouts, promises, replay, workspace  # noqa: F401  importing them registers their cases
from octavo.conformance.runner import run
from octavo.conformance.suite import Suite

__all__ = ["Suite", "run"]
