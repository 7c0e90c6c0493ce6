"""`octavo serve`: every setting is a flag. What is heavy is imported when the command runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from octavo.options import bad_input_is_told, from_flags, takes_every_setting
from octavo.settings import SettingsError
from octavo.settings_elsewhere import gone_flag

_NEEDED = frozenset({"fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client"})


class ServeCommand(TyperCommand):
    """A command that knows the flags which its users bring from TGI."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does it; a flag of TGI's that is not here is an error that says what to do instead."""
        for word in args:
            if instead := gone_flag(word):
                with bad_input_is_told():
                    raise SettingsError(instead)
        return super().parse_args(ctx, args)


_MODEL = typer.Argument(
    metavar="MODEL", help="A folder with a checkpoint, a GGUF file, a hub name, or demo. [MODEL_ID]"
)


def serve(model: Annotated[str | None, _MODEL] = None, **settings: Any) -> None:
    """Serve a model to clients of text-generation-inference and of OpenAI: octavo serve demo."""
    with bad_input_is_told():
        if model is not None and settings["model_id"] is not None:
            raise SettingsError(f"the model is {model} and --model-id {settings['model_id']}: give one of them")
        settings["model_id"] = settings["model_id"] or model
        chosen = from_flags(**settings)
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


takes_every_setting(serve)
