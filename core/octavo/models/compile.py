"""A captured model, its pieces compiled: straight from kernel to kernel, with attention called between them.

Each distinct piece is compiled for any number of tokens; on a CPU also for one, the most frequent step of a lone
request, with all sizes known. What remains, such as a last piece for a number of rows that varies on a CPU, runs as
recorded.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor import standalone_compile
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import PreTrainedModel

from octavo.models import operators
from octavo.models.capture import Attention, Capture, Forward, Piece, capture, eager, symbols

logger = logging.getLogger(__name__)


class CompileFailed(RuntimeError):
    """A model that cannot be compiled here, with the reason."""


def compiled(model: PreTrainedModel, *, fixed: bool = False) -> Forward:
    """Capture and compile a model whose layers are bound. Takes seconds. Raises NotCapturable or CompileFailed.

    fixed: it is only run with one number of tokens, more than one. Nothing is chosen by measuring then, so that another
    start computes the same bits.
    """
    recorded = capture(model)
    tokens, rows = (recorded.tokens[at].meta["val"].shape[-1].node.expr for at in (0, 2))
    on_gpu = _on_gpu(model)
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            warnings.simplefilter("ignore")  # the compiler's, about itself
            with _unmeasured() if fixed else nullcontext():
                many = _Program.of(recorded, partial(_compile_for_many, tokens=tokens, rows=rows if on_gpu else None))
            one = many if on_gpu or fixed else _Program.of(recorded, _compile_for_one)
    except Exception as error:
        # The compiler has no class of its own for what can go wrong in it.
        raise CompileFailed(" ".join(str(error).split())[:300]) from error
    plain, most_tokens, most_rows = eager(model), _most(recorded, tokens), _most(recorded, rows)

    def forward(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        if ids.shape[1] > 1 or one is many:
            fits = ids.shape[1] <= most_tokens and len(rows) <= most_rows
            return (many if fits else plain)(ids, positions, rows)
        # A chunk of one token whose logits nobody wants is rare.
        return (one if len(rows) == 1 else plain)(ids, positions, rows)

    return forward


def _unmeasured() -> AbstractContextManager[None]:
    """Within, the compiler chooses nothing by measuring, as far as this PyTorch can be told so."""
    known = hasattr(torch._inductor.config, "deterministic")
    return torch._inductor.config.patch(deterministic=True) if known else nullcontext()


def _most(recorded: Capture, size: Any) -> int:
    """Up to how many tokens, or rows, elements of a value can be counted in 32 bits, as compiled code does."""
    values = (node.meta.get("val") for step in recorded.steps if isinstance(step, Piece) for node in step.graph.nodes)
    numbers: Iterator[Any] = (value.numel() for value in values if isinstance(value, FakeTensor))
    widths = [int(n.node.expr.coeff(size)) for n in numbers if isinstance(n, torch.SymInt)]
    return (2**31 - 1) // max(1, *widths)


def _on_gpu(model: PreTrainedModel) -> bool:
    """There each kernel that is not launched counts; on a CPU the last piece is one product and little else."""
    return model.device.type != "cpu"


@dataclass(frozen=True, slots=True)
class _Step:
    """Call `run` with the values in registers `inputs`, put what it returns into `outputs`, let go of `spent`."""

    run: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    spent: tuple[int, ...]
    attends: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """Steps over registers: what the model computes, and nothing else."""

    values: list[Tensor | None]
    steps: list[_Step]
    output: int

    @classmethod
    def of(cls, recorded: Capture, compile_piece: Callable[[Piece], Callable[..., Any]]) -> _Program:
        """Compile each distinct piece once."""
        registers = {node: number for number, node in enumerate((*recorded.tokens, *recorded.constants))}
        last_use = {node: number for number, step in enumerate(recorded.steps) for node in step.inputs}
        known: dict[str, Callable[..., Any]] = {}
        steps = []
        for number, step in enumerate(recorded.steps):
            if isinstance(step, Attention):
                run, outputs = operators.registered(step.layer), [step.output]
            else:
                signature = step.signature()
                run, outputs = known.get(signature) or compile_piece(step), step.outputs
                known[signature] = run
            for node in outputs:
                registers[node] = len(registers)
            spent = [node for node in step.inputs if last_use[node] == number and node not in recorded.constants]
            inputs, outs, gone = (tuple(registers[node] for node in nodes) for nodes in (step.inputs, outputs, spent))
            steps.append(_Step(run, inputs, outs, gone, attends=isinstance(step, Attention)))
        values: list[Tensor | None] = [None] * len(registers)
        for node, constant in recorded.constants.items():
            values[registers[node]] = constant
        return cls(values, steps, registers[recorded.output])

    def __call__(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """As Forward."""
        values: list[Any] = list(self.values)
        values[:3] = ids, positions, rows
        for step in self.steps:
            results = step.run(*[values[number] for number in step.inputs])
            for number in step.spent:
                values[number] = None
            if step.attends:
                values[step.outputs[0]] = results
            else:
                for number, result in zip(step.outputs, results, strict=True):
                    values[number] = result
        logits: Tensor = values[self.output]
        return logits


def _as_recorded(piece: Piece) -> Callable[..., Any]:
    return fx.GraphModule(nn.Module(), piece.graph).forward


def _compile_for_many(piece: Piece, tokens: Any, rows: Any) -> Callable[..., Any]:
    """For any number of tokens, and for any rows of logits, if that size is given; beside another, nothing is compiled.

    The compiler takes an unknown size for 2 or more. What it writes for that does for 1 as well: only strides along an
    axis of one element could tell.
    """
    sizes = symbols(piece)
    if sizes == {tokens}:
        return _inductor(piece, _stand_ins(piece), "from_graph")
    if rows is None or sizes != {tokens, rows}:
        return _as_recorded(piece)
    several, recorded = _inductor(piece, _stand_ins(piece), "from_graph"), _as_recorded(piece)
    place = next(at for at, value in enumerate(piece.placeholders) if _sizes_of(value) == {rows})

    def last(*values: Any) -> Any:
        return (several if len(values[place]) else recorded)(*values)

    return last


def _sizes_of(value: Any) -> set[Any]:
    """The unknown sizes of one value."""
    return {size.node.expr for size in getattr(value, "shape", ()) if isinstance(size, torch.SymInt)}


def _stand_ins(piece: Piece) -> list[Any]:
    (mode,) = {value.fake_mode for value in piece.placeholders if isinstance(value, FakeTensor)}
    return [_stand_in(value, mode) for value in piece.placeholders]


def _compile_for_one(piece: Piece) -> Callable[..., Any]:
    """For one token and one row of logits: all sizes are 1."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        arguments = [
            torch.empty_strided(_sizes(value.shape), _sizes(value.stride()), dtype=value.dtype, device=value.device)
            if isinstance(value, FakeTensor)
            else value
            for value in piece.placeholders
        ]
    return _inductor(piece, [_stand_in(value, mode) for value in arguments], "from_example_inputs")


def _sizes(lengths: Sequence[int | torch.SymInt]) -> list[int]:
    """With 1 for each unknown."""
    return [
        int(length.node.expr.subs(dict.fromkeys(length.node.expr.free_symbols, 1)))
        if isinstance(length, torch.SymInt)
        else length
        for length in lengths
    ]


def _stand_in(value: Tensor, mode: FakeTensorMode) -> Tensor:
    """A weight as the compiler wants to see it: its shape alone."""
    return value if isinstance(value, FakeTensor) else mode.from_tensor(value, static_shapes=True)


def _inductor(piece: Piece, arguments: list[Any], shapes: Any) -> Callable[..., Any]:
    module = fx.GraphModule(nn.Module(), piece.graph)
    # In this process: helpers of the compiler would stay, with a PyTorch of their own in memory.
    # Sizes that the compiler knows are not looked at again in each call, which a lone request on a CPU would notice.
    options: dict[str, Any] = {"compile_threads": 1, "size_asserts": False}
    if _starts_early(piece):
        options["triton.enable_pdl"] = True
    with torch._inductor.config.patch(options):
        return standalone_compile(module, arguments, dynamic_shapes=shapes)


def _starts_early(piece: Piece) -> bool:
    """Can its kernels start while the last one ends (programmatic dependent launch)?

    PyTorch 2.10 knows it too, but lets kernels that only write start without waiting.
    """
    on_nvidia = torch.version.cuda is not None and any(_device(value) == "cuda" for value in piece.placeholders)
    return on_nvidia and torch.__version__ >= "2.11" and torch.cuda.get_device_capability() >= (9, 0)


def _device(value: Any) -> str | None:
    return value.device.type if isinstance(value, Tensor) else None
