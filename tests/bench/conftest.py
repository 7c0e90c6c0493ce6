"""A tiny model, and a ShareGPT of four conversations in place of the real one."""

import json
import sys
from pathlib import Path

import pytest

from octavo.bench import device_time
from octavo.bench.workload import SHAREGPT_PACKAGE
from tests.checkpoints import make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokenizer has a token for each byte."""
    return make("llama", tmp_path_factory.mktemp("tiny"))


CONVERSATIONS = [
    [("human", "a" * 10), ("gpt", "b" * 20), ("human", "c" * 12), ("gpt", "d" * 5)],
    [("gpt", "it begins with an answer"), ("human", "e" * 10)],
    [("human", "f" * 11), ("gpt", "g" * 100)],
    [("human", "h" * 50), ("gpt", "i" * 30)],
    [("human", "no answer")],
]


@pytest.fixture
def sharegpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its JSON, which breaks off inside the last conversation; the package is installed for the test."""
    listed = [
        {"id": str(number), "conversations": [{"from": who, "value": text} for who, text in turns]}
        for number, turns in enumerate(CONVERSATIONS)
    ]
    text = json.dumps(listed, indent=2)[:-40]
    data = tmp_path / SHAREGPT_PACKAGE / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    (data / "conversations.json").write_text(text)
    monkeypatch.delitem(sys.modules, SHAREGPT_PACKAGE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return text


@pytest.fixture
def no_sharegpt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is not installed."""
    monkeypatch.setitem(sys.modules, SHAREGPT_PACKAGE, None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are timed with next to nothing flushed, beside a ceiling measured with next to nothing."""
    monkeypatch.setattr(device_time, "FLUSHED_BYTES", 16)
    monkeypatch.setattr(device_time, "_READ_BYTES", 1 << 16)
