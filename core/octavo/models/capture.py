"""A model as one flat list of operators, cut at its attention layers into pieces, of which most are alike.

The model's Python runs once, on symbolic sizes (`make_fx`); what is recorded is what it does for any number of tokens.
A piece holds what happens between two attention layers. Weights are a piece's arguments, so that one piece serves every
layer that does the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from octavo.models import operators

_TOKENS, _ROWS = 7, 3
"""Sizes that the model runs with to be recorded: unequal, and neither is 0 or 1, which are recorded as constants."""


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Token ids [1, tokens], positions [1, tokens], rows of which logits are wanted [rows] -> logits [1, rows, vocab]."""


class NotCapturable(ValueError):
    """A model that does not compute alike for any number of tokens, with the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Operators between two attention layers: `graph` of the values of `inputs` gives a tuple of those of `outputs`."""

    graph: fx.Graph
    inputs: list[fx.Node]
    outputs: list[fx.Node]

    @property
    def placeholders(self) -> list[Any]:
        """What stands for each input: a tensor with symbolic sizes, or a weight itself."""
        return [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]

    def signature(self) -> str:
        """Equal for pieces that compute the same of arguments of the same shapes."""
        names: dict[fx.Node, str] = {}
        lines = []
        for node in self.graph.nodes:
            names[node] = f"%{len(names)}"
            arguments = tree_map_only(fx.Node, names.__getitem__, (node.args, node.kwargs))
            target = "" if node.op == "placeholder" else node.target
            lines.append(f"{node.op} {target} {arguments} {_kind(node.meta['val']) if not target else ''}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """A layer that attends: its number, query, key and value, and the result."""

    layer: int
    inputs: list[fx.Node]
    output: fx.Node


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """All of a model's forward pass. `constants` are the weights among the values, `output` is the logits."""

    tokens: list[fx.Node]
    """Token ids [1, tokens], positions [1, tokens], rows that want logits [rows]."""
    constants: dict[fx.Node, Tensor]
    steps: list[Piece | Attention]
    output: fx.Node


class Eager:
    """The model as transformers runs it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """As Forward."""
        output = self._model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
        logits: Tensor = output.logits
        return logits


def eager(model: PreTrainedModel) -> Forward:
    """The model as transformers runs it."""
    return Eager(model)


def capture(model: PreTrainedModel) -> Capture:
    """Record a model whose layers are bound. Raises NotCapturable with the reason; the model is left as it was."""
    device = model.device
    arguments = (
        torch.zeros(1, _TOKENS, dtype=torch.int64, device=device),
        torch.arange(_TOKENS, device=device)[None],
        torch.arange(_ROWS, device=device),
    )
    try:
        # A model that was loaded for inference may not be recorded in inference mode, whose tensors keep no version.
        with _silent(), torch.inference_mode(False), torch.no_grad(), operators.capturing():
            recorded = make_fx(eager(model), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*arguments)
    except Exception as error:
        # Whatever a model's own code makes of symbolic sizes: the model runs uncompiled.
        raise NotCapturable(" ".join(str(error).split())[:200] or type(error).__name__) from error
    return _cut(recorded)


@contextmanager
def _silent() -> Iterator[None]:
    """What fails is raised: PyTorch need not log it too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _cut(recorded: fx.GraphModule) -> Capture:
    recorded.graph.eliminate_dead_code()
    nodes = list(recorded.graph.nodes)
    tokens = [node for node in nodes if node.op == "placeholder"]
    shapes = tokens[0].meta["val"].fake_mode.shape_env
    if shapes.guards:
        raise NotCapturable(f"it computes differently where not {shapes.guards[0].expr} (of its numbers of tokens)")
    constants = {node: getattr(recorded, str(node.target)) for node in nodes if node.op == "get_attr"}
    (output,) = next(node for node in nodes if node.op == "output").args
    steps: list[Piece | Attention] = []
    members: list[fx.Node] = []
    for node in nodes:
        if node.target is operators.attention:
            steps += [_piece(members, constants), Attention(node.args[3], list(node.args[:3]), node)]
            members = []
        elif node.op == "call_function":
            members.append(node)
    return Capture(tokens, constants, [*steps, _piece(members, constants)], output)


@dataclass(slots=True)
class _Builder:
    """A piece that grows."""

    constants: dict[fx.Node, Tensor]
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[fx.Node] = field(default_factory=list)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def take(self, node: fx.Node) -> None:
        """Make a value from outside an input."""
        placeholder = self.graph.placeholder(f"input_{len(self.inputs)}")
        placeholder.meta["val"] = self.constants.get(node, node.meta.get("val"))
        self.inputs.append(node)
        self.copies[node] = placeholder

    def measure(self, size: fx.Node) -> None:
        """A size comes from a tensor that has it, so that it can be compiled as what it is."""
        for placeholder in self.graph.nodes:
            for axis, length in enumerate(getattr(placeholder.meta["val"], "shape", ())):
                if isinstance(length, torch.SymInt) and length.node.expr == size.meta["val"].node.expr:
                    self.copies[size] = self.graph.call_function(torch.ops.aten.sym_size.int, (placeholder, axis))
                    return
        raise NotCapturable(f"the size {size.meta['val']} comes from no tensor that is at hand")


def _piece(members: list[fx.Node], constants: dict[fx.Node, Tensor]) -> Piece:
    inside = set(members)
    outside = dict.fromkeys(source for node in members for source in node.all_input_nodes if source not in inside)
    sizes = [node for node in outside if isinstance(node.meta.get("val"), torch.SymInt)]
    builder = _Builder(constants)
    for node in outside:
        if node not in sizes:
            builder.take(node)
    for node in sizes:
        builder.measure(node)
    for node in members:
        builder.copies[node] = builder.graph.node_copy(node, builder.copies.__getitem__)
    outputs = [node for node in members if _is_wanted(node, inside)]
    builder.graph.output(tuple(builder.copies[node] for node in outputs))
    return Piece(builder.graph, builder.inputs, outputs)


def _is_wanted(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Is it used outside? Sizes are measured again."""
    return not isinstance(node.meta.get("val"), torch.SymInt) and any(user not in inside for user in node.users)


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}" if isinstance(value, Tensor) else ""


def symbols(piece: Piece) -> set[Any]:
    """The unknown sizes that a piece's inputs have."""
    return {symbol for value in piece.placeholders for symbol in _symbols(value)}


def _symbols(value: Any) -> Iterator[Any]:
    for length in getattr(value, "shape", ()):
        if isinstance(length, torch.SymInt):
            yield from length.node.expr.free_symbols
