"""What octavo does to the process that it runs in: its defaults for OpenMP, and what the garbage collector looks at."""

import gc
import os
import subprocess
import sys

import pytest

from octavo.settled import settle

SHOW = "import octavo, os; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")],
    ids=["octavo's own", "the user's number", "the user's policy, which a number would override"],
)
def test_how_long_threads_spin(given: dict[str, str], found: str) -> None:
    silent = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", SHOW], env=silent | given, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found


def test_the_collector_leaves_alone_what_is_there() -> None:
    there: list[object] = []
    there.append(there)
    assert any(one is there for one in gc.get_objects())
    settle()
    try:
        assert not any(one is there for one in gc.get_objects())
        later: list[object] = [there]
        assert any(one is later for one in gc.get_objects())
    finally:
        gc.unfreeze()
