"""`octavo serve`, of which every setting is a flag, and `octavo demo`. What is heavy is imported when they run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from octavo import logs
from octavo.options import bad_input_is_told, from_flags, takes_every_setting
from octavo.settings import Settings, SettingsError
from octavo.settings.elsewhere import gone_flag

logger = logging.getLogger(__name__)

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


@contextmanager
def _told() -> Iterator[None]:
    """What is not installed, and why the engine could not start, are messages with exit status 2 too."""
    with bad_input_is_told():
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name not in _NEEDED:
                raise
            raise OSError(f"the server needs {error.name}: pip install 'octavo[serve]'") from None
        except RuntimeError as error:
            from octavo.async_engine import EngineFailed  # it is there: it was raised, or something heavier was

            if isinstance(error, EngineFailed):
                raise OSError(str(error)) from None
            raise


def demo(
    check: Annotated[
        bool, typer.Option("--check", help="End after the answer, with status 0 if all went well.")
    ] = False,
) -> None:
    """Serve the demo model on this machine, and ask it something: octavo demo."""
    with _told():
        host = None if "host" in Settings(_warn=False).sources else "127.0.0.1"
        settings = Settings(model_id="demo", host=host)
        from octavo.server.demo import demo as run

        status = run(settings, lambda text: typer.echo(text, nl=False), check=check)
    raise typer.Exit(status)


def serve(model: Annotated[str | None, _MODEL] = None, **settings: Any) -> None:
    """Serve a model to clients of text-generation-inference and of OpenAI: octavo serve demo."""
    with _told():
        if model is not None and settings["model_id"] is not None:
            raise SettingsError(f"the model is {model} and --model-id {settings['model_id']}: give one of them")
        settings["model_id"] = settings["model_id"] or model
        with logs.held():  # until it is known how lines are written
            chosen = from_flags(**settings)
            logs.configure(chosen.json_output)
        from octavo.async_engine import EngineFailed
        from octavo.server.run import serve as run

        try:
            status = run(chosen)
        except EngineFailed as error:
            if not chosen.json_output:
                raise
            logger.critical("%s", error)
            status = 2
    raise typer.Exit(status)


takes_every_setting(serve)
