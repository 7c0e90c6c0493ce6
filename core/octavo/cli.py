"""The command line. What is heavy is imported by the command that needs it, so that `octavo --help` is quick."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from octavo import __version__
from octavo.options import bad_input_is_told, from_flags, setting, sources, takes_every_setting
from octavo.server.cli import ServeCommand, demo, serve
from octavo.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from octavo.llm import LLM
    from octavo.outputs import RequestOutput

app = typer.Typer(
    help="Serve language models from a paged key-value cache. Settings are also read from variables, e.g. ATTENTION.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The program `octavo`. Exits with 2 on bad input, with one message on stderr."""
    app(prog_name="octavo")


Attention = Annotated[str | None, setting("attention")]
BlockSize = Annotated[int | None, setting("block_size")]
DeviceName = Annotated[str | None, setting("device")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def backends(
    device: DeviceName = None, attention: Attention = None, block_size: BlockSize = None, as_json: AsJson = False
) -> None:
    """List the attention backends, what speaks against each here, and plugins at fault."""
    with bad_input_is_told():
        import logging

        logging.getLogger("octavo.plugins").setLevel(logging.ERROR)  # the table says it
        from octavo.attention.report import Report
        from octavo.attention.select import choose_device
        from octavo.plugins import plugins

        settings = from_flags(device=device, attention=attention, block_size=block_size)
        on = choose_device(settings.device, plugins())
        report = Report.of(on, settings.attention, settings.block_size, plugins())
        if as_json:
            typer.echo(json.dumps(report.to_dict(), indent=2))
        else:
            Console().print(report)
        if report.problem is not None:
            raise report.problem


@app.command("demo-model")
def demo_model_folder() -> None:
    """Prepare the demo model, SmolLM2-135M-Instruct, and print its folder."""
    with bad_input_is_told():
        from octavo.models.demo import demo_model

        typer.echo(demo_model(Settings().octavo_cache))


@dataclass(frozen=True, slots=True)
class Answers:
    """What `octavo generate` prints."""

    texts: Sequence[str]
    outputs: Sequence[RequestOutput]
    seconds: float
    backend: str

    @property
    def summary(self) -> dict[str, Any]:
        """Of all prompts together."""
        generated = sum(len(one.token_ids) for output in self.outputs for one in output.completions)
        return {
            "generated_tokens": generated,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(generated / self.seconds, 1),
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in self.outputs),
            "cached_tokens": sum(output.cached_tokens for output in self.outputs),
            "backend": self.backend,
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        answers = [
            {
                "prompt": text,
                "text": output.completions[0].text,
                "finish_reason": output.completions[0].finish_reason,
                "error": output.completions[0].error,
                "generated_tokens": len(output.completions[0].token_ids),
                "prompt_tokens": len(output.prompt_token_ids),
                "cached_tokens": output.cached_tokens,
            }
            for text, output in zip(self.texts, self.outputs, strict=True)
        ]
        return {"answers": answers, **self.summary}

    def show(self, console: Console) -> None:
        """Each prompt with its answer, then one line of numbers."""
        for text, output in zip(self.texts, self.outputs, strict=True):
            answer = output.completions[0]
            console.print(Text(text, "bold"), soft_wrap=True)
            console.print(Text(answer.text.strip()), soft_wrap=True)
            if answer.error:
                console.print(Text(answer.error, "red"), soft_wrap=True)
            console.print()
        numbers = self.summary
        line = (
            f"{numbers['tokens_per_second']} tokens/s ({numbers['generated_tokens']} in {self.seconds:.2f} s), "
            f"{numbers['prompt_tokens']} prompt tokens, {numbers['cached_tokens']} of them cached; {self.backend}"
        )
        console.print(Text(line, "dim"), soft_wrap=True)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder with a checkpoint, a GGUF file, a hub name, or demo.")
    ],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help='"-" stands for the lines of stdin.')],
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens that hold this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answer.")] = None,
    chat: Annotated[
        bool | None, typer.Option(help="Put prompts into the model's chat template. Default: if it has one.")
    ] = None,
    attention: Attention = None,
    dtype: Annotated[str | None, setting("dtype")] = None,
    device: DeviceName = None,
    block_size: BlockSize = None,
    max_batch_total_tokens: Annotated[int | None, setting("max_batch_total_tokens")] = None,
    compile_model: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Compile the model first, which pays from some hundred tokens on."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer prompts: octavo generate demo "What is a page table?"."""
    with bad_input_is_told():
        from octavo import LLM, SamplingParams

        texts = list(_prompts(prompts))
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        flags: dict[str, Any] = {
            "attention": attention, "dtype": dtype, "device": device, "block_size": block_size,
            "max_batch_total_tokens": max_batch_total_tokens,
            "compile": Settings(compile=compile_model, _warn=False).compile or False,
        }  # fmt: skip
        llm = LLM(model, progress=not as_json, _sources=sources(flags), **flags)
        tokens = [_encoded(llm, text, chat) for text in texts]
        start = time.perf_counter()
        outputs = llm.generate(tokens, params, progress=not as_json)
        answers = Answers(texts, outputs, time.perf_counter() - start, llm.selection.summary())
        if as_json:
            typer.echo(json.dumps(answers.to_dict(), indent=2, ensure_ascii=False))
        else:
            answers.show(Console())
        if any(one.error for output in outputs for one in output.completions):
            raise typer.Exit(1)


def _prompts(given: Sequence[str]) -> Iterator[str]:
    for text in given:
        if text == "-":
            yield from filter(None, sys.stdin.read().splitlines())
        else:
            yield text


def _encoded(llm: LLM, text: str, chat: bool | None) -> list[int]:
    """The prompt's tokens, as a user's turn where the chat template is wanted."""
    tokenizer: PreTrainedTokenizerBase | None = llm.tokenizer
    templated = tokenizer is not None and tokenizer.chat_template is not None
    if chat and not templated:
        raise ValueError("the model has no chat template: leave --chat out")
    if tokenizer is None or not templated or chat is False:
        return llm.encode(text)
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(turn, add_special_tokens=False)["input_ids"]
    return ids


@app.command()
def conformance(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A backend, as ATTENTION names it.")],
    device: DeviceName = None,
    case: Annotated[
        str | None, typer.Option("--case", "--only", help="A case, or one trial as the table names it.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed, the same numbers.")] = 0,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure it too: beside the reference and the memory's bandwidth.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report to this file too.")] = None,
    junit_path: Annotated[Path | None, typer.Option("--junit", help="And as JUnit XML to this one.")] = None,
) -> None:
    """Does a backend compute attention? Exits with 0 if all is well, 1 if not, 2 if it cannot run here."""
    with bad_input_is_told():
        from octavo.conformance import run

        where = from_flags(device=device).device
        status = run(name, device=where, only=case, seed=seed, bench=bench, json_path=json_path, junit_path=junit_path)
    raise typer.Exit(status)


@app.command("new-backend")
def write_new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What ATTENTION will call it.")],
) -> None:
    """Write a backend of your own, octavo-NAME, into a new folder here: it computes, and its tests pass."""
    with bad_input_is_told():
        from octavo.new_backend import new_backend
        from octavo.plugins import plugins

        folder = new_backend(name, Path.cwd(), plugins())
    typer.echo(f"{folder} is written. Next:\n\n  cd {folder.name}\n  pip install -e '.[test]'")
    typer.echo(f"  python -m pytest\n  octavo conformance {name} --device cpu\n\nIts README.md goes on from there.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure: throughput, waste, ... (octavo bench --help)."""
    from octavo.bench.cli import app as benchmarks

    with bad_input_is_told():
        benchmarks(context.args, prog_name="octavo bench")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def kernels(context: typer.Context) -> None:
    """Compile kernels for hardware that need not be here (octavo kernels --help)."""
    from octavo.bench.ahead_command import app as ahead

    with bad_input_is_told():
        ahead(context.args, prog_name="octavo kernels")


def show_settings(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page of all settings instead.")] = False,
    **given: Any,
) -> None:
    """What every setting is with these flags, here, and where it comes from."""
    from octavo import settings_page

    with bad_input_is_told():
        if markdown:
            typer.echo(settings_page.markdown(), nl=False)
        else:
            Console(highlight=False).print(settings_page.table(from_flags(**given)))


takes_every_setting(show_settings)
app.command("settings")(show_settings)
app.command()(demo)
app.command(cls=ServeCommand)(serve)


if __name__ == "__main__":
    main()
