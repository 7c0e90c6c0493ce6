"""`octavo serve`: every setting is a flag. What is heavy is imported when the command runs."""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from octavo.options import bad_input_is_told, every_setting
from octavo.settings import Settings

_NEEDED = frozenset({"fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client"})


def serve(model: str | None = None, **settings: Any) -> None:
    """Serve a model to clients of text-generation-inference and of OpenAI: octavo serve demo."""
    with bad_input_is_told():
        chosen = Settings(model_id=model, **settings)
        try:
            from octavo.server.run import serve as run
        except ModuleNotFoundError as error:
            if error.name not in _NEEDED:
                raise
            raise OSError(f"the server needs {error.name}: pip install 'octavo[serve]'") from None
        from octavo.async_engine import EngineFailed

        try:
            status = run(chosen)
        except EngineFailed as error:
            typer.echo(f"octavo: {error}", err=True)
            status = 2
    raise typer.Exit(status)


_MODEL = typer.Argument(
    metavar="[MODEL]", help="A folder with a checkpoint, a GGUF file, a hub name, or demo. [MODEL_ID]"
)
serve.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=Annotated[str | None, _MODEL]),
        *every_setting("model_id"),
    ]
)
