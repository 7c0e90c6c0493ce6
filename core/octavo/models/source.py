"""Where a model is: a folder, a GGUF file or a name on the hub, told apart without reading any of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.settings import Settings

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class ModelNotFound(FileNotFoundError):
    """No model where it was looked for; the message says where that was, and the ways out."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint is: what transformers is asked for."""

    location: str
    """A folder or a hub name."""
    gguf_file: str | None
    options: dict[str, Any]


def require(settings: Settings) -> None:
    """Raise `ModelNotFound` where the settings name a model that is not here and is no name on the hub."""
    if settings.model_id is None or settings.model_id == "demo":
        return
    if settings.load_format == "dummy":
        configuration_at(settings.model_id)
    else:
        find(settings.model_id, {})


def configuration_at(model: str | Path) -> Path:
    """The folder or the file, as what has a configuration for `load_random`. Raises `ModelNotFound`."""
    path = Path(model).expanduser()
    if not (path / "config.json" if path.is_dir() else path).is_file() or path.suffix == ".gguf":
        raise ModelNotFound(
            f"there is no configuration at {path.absolute()}, and random weights (load_format dummy) need one at hand: "
            "give a folder with config.json, or a file such as this"
        )
    return path


def find(model: str | Path, options: dict[str, Any]) -> Source:
    """Where a model is: a folder, a `.gguf` file or a hub name; nothing is fetched. Raises `ModelNotFound`."""
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path.absolute()} is neither a folder nor a .gguf file; give the checkpoint's folder")
        return Source(str(path.parent), path.name, options)
    if path.is_dir():
        return Source(str(path), _gguf_file(path), options)
    if isinstance(model, Path) or not _HUB_NAME.fullmatch(model) or model.endswith(".gguf"):
        raise ModelNotFound(
            f"there is no model at {path.absolute()}; give a folder with config.json and safetensors files, "
            "a .gguf file, or a hub name such as owner/model"
        )
    return Source(model, None, options)


def _gguf_file(folder: Path) -> str | None:
    """Return the name of the one GGUF file of a folder that is no ordinary checkpoint."""
    if (folder / "config.json").is_file():
        return None
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelNotFound(f"{folder.absolute()} has {len(files)} GGUF files; name one: {', '.join(files)}")
    raise ModelNotFound(f"{folder.absolute()} has neither a config.json nor a .gguf file, so it holds no model")
