"""octavo bench throughput: its options."""

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
from octavo.options import setting


def throughput(
    model: Model = None,
    random_weights: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="A configuration, a folder or a file: measure it with random weights."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Sent at once.")] = 32,
    input_min: ShortestPrompt = 64,
    input_max: LongestPrompt = 256,
    output_min: ShortestAnswer = 64,
    output_max: LongestAnswer = 128,
    single: Annotated[bool, typer.Option(help="Measure one request alone too.")] = True,
    single_input: Annotated[int, typer.Option(min=1, help="The prompt of that request, tokens.")] = 64,
    single_output: Annotated[int, typer.Option(min=1, help="The answer of that request, tokens.")] = 128,
    seed: Seed = 0,
    sharegpt: ShareGPT = None,
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform",
            help="Instead: all lengths of the ranges equally likely, token ids up to 10000, as nano-vllm's benchmark.",
        ),
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy. Above it only octavo is measured.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of both engines: float32, float16 or bfloat16.")] = "float32",
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="A backend, as ATTENTION names them. May be given several times: octavo is measured with each in "
            "turn. Default: as the variable says."
        ),
    ] = None,
    block_size: Annotated[int | None, setting("block_size")] = None,
    max_total_tokens: Annotated[int | None, setting("max_total_tokens")] = None,
    prefix_caching: Annotated[bool | None, setting("prefix_caching", "--prefix-caching/--no-prefix-caching")] = None,
    deterministic: Annotated[bool, setting("deterministic", "--deterministic")] = False,
    uncompiled: Annotated[
        bool, typer.Option("--uncompiled", help="Measure octavo with COMPILE=0 too, in turn.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Of both engines. Default: as PyTorch decides.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 3,
    peer: Annotated[
        bool | None, typer.Option(help="Measure transformers' generate too, in turn. Default: where greedy.")
    ] = None,
    json_path: JsonFile = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write to this file where octavo's time goes with the first backend, from a further run.",
        ),
    ] = None,
) -> None:
    """Tokens a second, octavo and transformers' generate in turn, each time in a fresh process."""
    from octavo.bench.throughput import Load, Options, check_names, model_of, run
    from octavo.bench.workload import Range
    from octavo.plugins import plugins

    if peer and temperature:
        raise ValueError(
            f"temperature is {temperature:g}, and the peer is compared token by token, which are greedy then: "
            "leave out --temperature or --peer"
        )
    if sharegpt and uniform:
        raise ValueError("requests come from ShareGPT or are uniform: give --sharegpt or --uniform")
    check_names(attention or (), plugins())
    loads = [Load(requests, Range(input_min, input_max), Range(output_min, output_max))]
    if single:
        loads.append(Load(1, Range(single_input, single_input), Range(single_output, single_output)))
    folder = model_of(model, random_weights, dtype)
    options = Options(
        model=folder,
        name=Path(folder).name if random_weights is None else f"{random_weights} with random weights",
        random_weights=random_weights is not None,
        loads=loads,
        seed=seed,
        sharegpt=sharegpt,
        uniform=uniform,
        temperature=temperature,
        dtype=dtype,
        attention=attention or (),
        block_size=block_size,
        max_total_tokens=max_total_tokens,
        prefix_caching=prefix_caching,
        deterministic=deterministic,
        uncompiled=uncompiled,
        threads=threads,
        repeats=repeats,
        peer=not temperature if peer is None else peer,
        profile=profile is not None,
    )
    with Console(stderr=True).status("preparing") as status:
        report, profiled = run(options, status.update)
    show(report, json_path)
    if profiled is not None:
        show(profiled, profile)
