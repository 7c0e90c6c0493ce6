"""The server against its own description, by schemathesis: every route, all of its checks, and one of ours.

As many examples for each route as OCTAVO_SCHEMATHESIS_EXAMPLES says, on top of those that the description calls for.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Note
from tests.server.live import Live, live

EXAMPLES = os.environ.get("OCTAVO_SCHEMATHESIS_EXAMPLES", "10")
CONFIG = Path(__file__).with_name("schemathesis.toml")
ROOT = CONFIG.parents[2]


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Live]:
    """Its answers are short, so that there are many."""
    with live(folder, max_total_tokens=32, max_batch_total_tokens=1024, api_key="key") as running:
        yield running


@pytest.mark.timeout(3600)
def test_every_route_is_as_described(small: Live, tmp_path: Path, note: Note) -> None:
    report = tmp_path / "report.json"
    command = [
        "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", f"{small.url}/openapi.json", "-n", EXAMPLES,
        "--report", "json", "--report-json-path", str(report),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    paths = small.http.config.app.openapi()["paths"]  # type: ignore[union-attr]
    assert found["operations"]["tested"] == sum(map(len, paths.values()))
    note(f"{found['test_cases']['generated']} examples")
    assert found["test_cases"]["generated"] > 100 * len(paths)
    assert small.held() == (0, 0)
    assert small.service.admission.taken == 0
