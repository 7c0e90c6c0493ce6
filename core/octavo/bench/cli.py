"""octavo bench: what it measures, and the pages that show it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.bench.flags import (
    JsonFile,
    LongestAnswer,
    LongestPrompt,
    Model,
    Seed,
    ShareGPT,
    ShortestAnswer,
    ShortestPrompt,
    show,
)
from octavo.bench.kernels_command import kernels
from octavo.bench.throughput_command import throughput
from octavo.options import setting

app = typer.Typer(
    help="Measure octavo: a table on the screen, and the numbers behind it with --json FILE.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(throughput)
app.command()(kernels)


@app.command()
def serving(
    model: Model = None,
    url: Annotated[str | None, typer.Option(help="A server that runs. Unset: octavo serve is started.")] = None,
    streams: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop: clients, each sends when its last request is answered. [default: 64]"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Instead: requests a second that arrive by a Poisson process.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="All in all.")] = 128,
    input_min: ShortestPrompt = 64,
    input_max: LongestPrompt = 256,
    output_min: ShortestAnswer = 64,
    output_max: LongestAnswer = 128,
    slo: Annotated[
        str | None, typer.Option(metavar="LIMITS", help="What a good request keeps, seconds: ttft=1.5,tpot=0.2,e2e=20.")
    ] = None,
    seed: Seed = 0,
    sharegpt: ShareGPT = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    attention: Annotated[str | None, setting("attention")] = None,
    block_size: Annotated[int | None, setting("block_size")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the engine. Default: as PyTorch decides.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each; even: neither is favoured by drift.")] = 4,
    peer: Annotated[
        bool | None,
        typer.Option(help="Measure octavo.LLM on the same requests too, in turn. Default: in a closed loop."),
    ] = None,
    json_path: JsonFile = None,
    steps: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write step times by batch size to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the distributions of the latencies: .svg, .png, .pdf.")
    ] = None,
) -> None:
    """What clients of octavo serve see: time to first token, between tokens, goodput; and what it costs the engine."""
    from octavo.bench.latency import Objectives
    from octavo.bench.serving import Options, run
    from octavo.bench.throughput import Load, model_of
    from octavo.bench.workload import Range

    if rate is not None and streams is not None:
        raise ValueError("streams is a closed loop and rate an open one: give one of them")
    closed = rate is None
    if peer and (url is not None or not closed):
        raise ValueError(
            "octavo.LLM is compared with octavo serve in a closed loop: leave out --peer, --url and --rate"
        )
    folder = model_of(model, None, dtype)
    options = Options(
        model=folder,
        name=Path(folder).name,
        load=Load(requests, Range(input_min, input_max), Range(output_min, output_max)),
        streams=(streams or 64) if closed else None,
        rate=rate,
        url=url,
        objectives=Objectives.read(slo) if slo else None,
        seed=seed,
        sharegpt=sharegpt,
        dtype=dtype,
        attention=attention,
        block_size=block_size,
        threads=threads,
        repeats=repeats,
        peer=closed and url is None if peer is None else peer,
    )
    with Console(stderr=True).status("preparing") as status:
        found = run(options, status.update)
    show(found.report, json_path)
    if found.steps is not None:
        show(found.steps, steps)
    if plot is not None:
        from octavo.bench.plot import draw

        draw(found.latencies, options.objectives, plot)


@app.command()
def waste(
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="Conversations, first turns.")] = 2000,
    cache_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the cache's bytes hold.")] = 65536,
    max_total_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of a request, prompt and answer.")] = 2048,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="What each client asks for; longer answers end there.")
    ] = 1024,
    max_batch_prefill_tokens: Annotated[int, setting("max_batch_prefill_tokens")] = 4096,
    block_size: Annotated[list[int], typer.Option(min=1, help="May be given several times.")] = [1, 16, 64, 256],  # noqa: B006
    seed: Seed = 0,
    sharegpt: ShareGPT = None,
    json_path: JsonFile = None,
) -> None:
    """Cache slots reserved but unused, by the way of reserving them, and requests at once for the same bytes."""
    from octavo.bench.waste import Cache, report
    from octavo.bench.workload import SHORTEST, Range, Source, model_folder

    cache = Cache(
        cache_tokens=cache_tokens,
        max_total_tokens=max_total_tokens,
        max_new_tokens=max_new_tokens,
        max_batch_prefill_tokens=max_batch_prefill_tokens,
    )
    source = Source.of(folder := model_folder(model), sharegpt)
    prompts = Range(SHORTEST, max_total_tokens - max_new_tokens)
    exchanges = source.conversations(requests, prompts, max_new_tokens, seed)
    found = report(exchanges, cache, block_size, lengths=source.name, tokenizer=Path(folder).name, seed=seed)
    show(found, json_path)


@app.command()
def tenants(
    url: Annotated[str, typer.Option(help="A server that runs, with two API keys at least.")] = "http://localhost:3000",
    key: Annotated[list[str], typer.Option(help="An API key; give two.")] = [],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 200,
    words: Annotated[int, typer.Option(min=1, help="Of each prompt.")] = 60,
    seed: Seed = 0,
    json_path: JsonFile = None,
) -> None:
    """Time to first token of prompts that another API key has sent before, beside those that nobody has."""
    from octavo.bench.tenants import Options, run

    if len(set(key)) != 2:
        raise ValueError(f"{len(set(key))} API keys are given, and two are compared: --key FIRST --key SECOND")
    with Console(stderr=True).status("asking") as status:
        report = run(Options(url, (key[0], key[1]), rounds, words, seed), status.update)
    show(report, json_path)


@app.command()
def table(files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Written with --json.")]) -> None:
    """Print results as Markdown."""
    from octavo.bench.report import Report

    for file in files:
        typer.echo(f"{Report.read(file).markdown()}\n")


@app.command()
def page(pages: Annotated[list[Path], typer.Argument(metavar="PAGE", help="Markdown with marked tables.")]) -> None:
    """Put results into a page: the tables between `<!-- table: FILE.json -->` and `<!-- end -->` are made anew."""
    from octavo.bench.report import filled

    for path in pages:
        path.write_text(filled(path.read_text(encoding="utf-8"), path.parent), encoding="utf-8")
