"""C++ that ships as source: built once, never loaded from somebody else, and its absence is a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import native

CODE = """
#include <cstdint>
extern "C" int64_t twice(int64_t x) { return 2 * x; }
"""


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A source file of its own, in a cache of its own."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "twice.cpp"
    path.write_text(CODE)
    native._load.cache_clear()
    yield path
    native._load.cache_clear()


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kernels").iterdir())


def test_what_is_built_can_be_called(source: Path) -> None:
    assert native.load(source).twice(21) == 42


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in (native.fault(source) or "")
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        native.load(source)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(RuntimeError, match="this compiler is broken"):
        native.load(source)
    assert "this compiler is broken" in (native.fault(source) or "")
    assert [left.suffix for left in kept(tmp_path)] == [".failed"]


def test_a_library_that_others_may_write_is_not_loaded(source: Path, tmp_path: Path) -> None:
    native.load(source)
    (library,) = kept(tmp_path)
    library.chmod(0o777)
    native._load.cache_clear()
    with pytest.raises(RuntimeError, match="others may write it"):
        native.load(source)


def test_the_library_is_built_once_and_kept_and_another_source_is_another_library(source: Path, tmp_path: Path) -> None:
    native.load(source)
    (library,) = kept(tmp_path)
    built = library.stat().st_mtime_ns
    native._load.cache_clear()
    native.load(source)
    assert library.stat().st_mtime_ns == built
    source.write_text(CODE.replace("2 * x", "3 * x"))
    native._load.cache_clear()
    assert native.load(source).twice(2) == 6
    assert len(kept(tmp_path)) == 2
