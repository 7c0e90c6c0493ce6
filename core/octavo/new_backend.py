"""`octavo new-backend NAME`: the distribution `octavo-example` under another name."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from octavo.attention.installed import backends
from octavo.plugins import Plugins

_HERE: Final = Path(__file__).parent
_EXAMPLE: Final = _HERE / "example" if (_HERE / "example").is_dir() else _HERE.parents[1] / "plugins/example"
"""Where octavo is installed, and where it runs from a clone."""
_PATTERNS: Final = ("pyproject.toml", "README.md", "octavo_example/*.py", "tests/*.py")
_NAME: Final = re.compile(r"[a-z](_?[a-z0-9])*")


def new_backend(name: str, folder: Path, plugins: Plugins) -> Path:
    """Write the distribution `octavo-NAME` into a new folder of that name in `folder`, which is returned.

    Raises ValueError for a name that cannot be a package's or is taken, and for a folder that is there already.
    """
    _check(name, plugins)
    target = folder / f"octavo-{name}"
    try:
        target.mkdir()
    except FileExistsError:
        raise ValueError(f"{target} is there already: move it away, or take another name than {name}") from None
    try:
        _write(target, name)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)  # half of it would be in the way of the next try
        raise
    return target


def _write(target: Path, name: str) -> None:
    sources = sorted(path for pattern in _PATTERNS for path in _EXAMPLE.glob(pattern))
    if not sources:
        raise FileNotFoundError(f"the example to copy is not at {_EXAMPLE}: install octavo again")
    for source in sources:
        written = target / _renamed(str(source.relative_to(_EXAMPLE)), name)
        written.parent.mkdir(exist_ok=True)
        written.write_text(_renamed(source.read_text(encoding="utf-8"), name), encoding="utf-8")


def _renamed(text: str, name: str) -> str:
    camel = "".join(map(str.capitalize, name.split("_")))
    return text.replace("example", name).replace("Example", camel)


def _check(name: str, plugins: Plugins) -> None:
    if not _NAME.fullmatch(name):
        like = re.sub(r"[^a-z0-9]+", "_", name.casefold()).strip("_0123456789")
        raise ValueError(
            f'NAME is "{name}": a package and a class are called by it, so it must be small letters, digits and single '
            f"underscores, a letter first{f': {like}, for instance' if _NAME.fullmatch(like) else ''}"
        )
    owners = {one.kind.name.casefold(): str(one.origin) for one in backends(plugins)}
    if find_spec(f"octavo_{name}"):
        owners[name] = f"the package octavo_{name}"
    if name in owners or name == "auto":
        by = f" by {owners[name]}" if name in owners else ": ATTENTION=auto takes the best there is"
        raise ValueError(f'NAME "{name}" is taken{by}; take another one than {", ".join(sorted({*owners, "auto"}))}')
