"""A soak: random clients on one server for as long as is wished, whose engine is killed again and again.

    python -m tests.soak --minutes 30 --seed 1 --json soak.json

Each request must be answered rightly or fail with a reason that is documented; at the end nothing may be held, and
memory must be flat. Exit status 1 tells of a fault. Ctrl-C ends it early, with what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from octavo.bench.machine import commit, machine, versions
from tests import checkpoints
from tests.soak.story import Story


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="A folder; default: a tiny Llama.")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE", help="The result goes there too.")
    parser.add_argument("--log", type=Path, metavar="FILE", help="What the server says; default: nowhere.")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        model = chosen.model or str(checkpoints.make("llama", Path(folder) / "llama"))
        story = Story(model, chosen.log or Path(folder) / "log", chosen.minutes * 60, chosen.seed, chosen.clients, say)
        try:
            asyncio.run(story.run())
        except KeyboardInterrupt:
            story.faults.append("interrupted")
    result = {
        "machine": machine(), "versions": versions(), "commit": commit(), "minutes": chosen.minutes,
        "seed": chosen.seed, "clients": chosen.clients, "model": chosen.model or "a tiny Llama", **story.result(),
    }  # fmt: skip
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    say(json.dumps(result, indent=2))
    return 1 if story.faults else 0


def say(*words: Any) -> None:
    """On the terminal, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
