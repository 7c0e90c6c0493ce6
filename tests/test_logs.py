"""The log as JSON: every line an object, whoever wrote it."""

import json
import logging
import subprocess
import sys

import pytest

from octavo import logs

RUN = """
import logging, threading, warnings
from octavo import logs
with logs.held():
    logging.getLogger("early").warning("before it is known %s", "how")
    logs.configure(as_json=True)
logging.getLogger("some").info("two\\nlines", extra={"fields": {"request_id": "r"}})
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
raise KeyError("x")
"""


def test_all_that_a_process_says_is_json() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    early, some, warned, thread, last = [json.loads(line) for line in done.stderr.splitlines()]
    assert (early["logger"], early["message"], early["level"]) == ("early", "before it is known how", "WARNING")
    assert (some["message"], some["request_id"], some["level"]) == ("two\nlines", "r", "INFO")
    assert (warned["logger"], warned["level"]) == ("py.warnings", "WARNING")
    assert "UserWarning: old" in warned["message"]
    assert thread["exception"].endswith("ZeroDivisionError: division by zero")
    assert last["exception"].endswith("KeyError: 'x'")
    assert (thread["level"], last["level"]) == ("CRITICAL", "CRITICAL")


def test_what_is_held_comes_out_where_nothing_is_configured(caplog: pytest.LogCaptureFixture) -> None:
    """As it does where a setting is wrong."""

    def settings() -> None:
        with logs.held():
            logging.getLogger("early").warning("did you mean?")
            assert caplog.messages == []
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        settings()
    assert caplog.messages == ["did you mean?"]
