"""Gluon kernels on a CPU, as plain Python over PyTorch's tensors: what they compute, not which thread has what.

Triton's own interpreter knows no Gluon. Layouts are nothing here: that they fit each other is seen when a kernel is
compiled.
Whatever lies beside a tensor is an error to read or write.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.runtime.jit import ConstexprFunction


class Value(Tensor):
    """A tensor in a kernel."""

    @property
    def type(self) -> Any:
        """As Gluon's."""
        return types.SimpleNamespace(layout=None)


@dataclass(frozen=True, slots=True)
class Pointer:
    """Some elements of a tensor's memory."""

    memory: Tensor
    """[elements] from the tensor's first one on."""
    at: Any

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        """To a tensor's first element."""
        spans = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tensor.as_strided((1 + sum(spans),), (1,)), _value(torch.tensor(0, dtype=torch.int32)))

    @property
    def dtype(self) -> Any:
        """As Gluon's."""
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        """Offsets are of 64 bits once they are added: before, what is computed of 32 bits wraps round."""
        return Pointer(self.memory, self.at.long() + offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Indices into memory and which of them count, alike in shape. Raises IndexError for one that is beside it."""
        at, mask = torch.broadcast_tensors(self.at, _value(True if mask is None else mask))
        wrong = mask & ((at < 0) | (at >= len(self.memory)))
        if wrong.any():
            raise IndexError(f"element {int(at[wrong][0])} of memory that has {len(self.memory)}")
        return at.as_subclass(Tensor).long(), mask.as_subclass(Tensor)


def _value(given: Any) -> Any:
    return torch.as_tensor(given).as_subclass(Value)


class Language:
    """What stands for `gl` while a kernel runs."""

    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    int16, int32, int64 = torch.int16, torch.int32, torch.int64
    abs, exp, exp2, floor, log2 = torch.abs, torch.exp, torch.exp2, torch.floor, torch.log2
    expand_dims, permute, reshape = torch.unsqueeze, torch.permute, torch.reshape
    static_range = range

    def __init__(self, program: int) -> None:
        self._program = program

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.endswith(("Layout", "barrier")):
            return lambda *_, **__: None
        raise AttributeError(name)

    def program_id(self, axis: int) -> Any:
        return _value(torch.tensor(self._program, dtype=torch.int32))

    @staticmethod
    def cdiv(a: Any, b: int) -> int:
        return math.ceil(int(a) / b)

    @staticmethod
    def arange(start: int, end: int, layout: object) -> Any:
        return _value(torch.arange(start, end, dtype=torch.int32))

    @staticmethod
    def zeros(shape: list[int], dtype: torch.dtype, layout: object) -> Any:
        return _value(torch.zeros(shape, dtype=dtype))

    @staticmethod
    def full(shape: list[int], number: float, dtype: torch.dtype, layout: object) -> Any:
        return _value(torch.full(shape, number, dtype=dtype))

    @staticmethod
    def convert_layout(value: Any, layout: object, assert_trivial: bool = False) -> Any:
        return value

    @staticmethod
    def join(a: Any, b: Any) -> Any:
        return torch.stack([a, b], -1)

    @staticmethod
    def multiple_of(value: Any, factors: list[int]) -> Any:
        assert not (value % factors[-1]).any(), "a compiler would count on it"
        return value

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return torch.minimum(_value(a), _value(b))

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return torch.maximum(_value(a), _value(b))

    @staticmethod
    def broadcast(a: Any, b: Any) -> Any:
        return torch.broadcast_tensors(a, b)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return torch.where(condition, a, b)

    @staticmethod
    def max(value: Any, axis: int) -> Any:
        return value.amax(axis)

    @staticmethod
    def sum(value: Any, axis: int) -> Any:
        return value.sum(axis)

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: float = 0.0, **_: Any) -> Any:
        at, real = pointer.places(mask)
        found = pointer.memory[at.clamp(0, len(pointer.memory) - 1)].clone()
        return _value(found if mask is None else torch.where(real, found, torch.full_like(found, other)))

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
        at, real = pointer.places(mask)
        pointer.memory[at[real]] = _value(value).as_subclass(Tensor).expand(at.shape)[real].to(pointer.memory.dtype)

    @staticmethod
    def atomic_add(pointer: Pointer, value: int, sem: str) -> Any:
        before = Language.load(pointer)
        Language.store(pointer, before + value)
        return before

    @staticmethod
    def inline_asm_elementwise(asm: str, constraints: str, args: list[Any], *_: Any, **kwargs: Any) -> Any:
        if asm.startswith("and.b32"):
            value, mask = (one.as_subclass(Tensor) for one in args)
            return _value((value.contiguous().view(torch.int16) & mask).view(value.dtype))
        if constraints.endswith("=h,r"):
            (words,), wanted = args, kwargs["dtype"][0]
            held = torch.float8_e4m3fn if "e4m3" in asm else torch.float8_e5m2 if "prmt" in asm else wanted
            elements = words.as_subclass(Tensor).contiguous()[..., None].view(held).to(wanted)
            return tuple(map(_value, elements.unbind(-1)))
        assert asm.startswith("griddepcontrol"), asm
        return 0


def _mma(a: Any, b: Any, total: Any) -> Any:
    """Products of 16 bits are exact in float32."""
    return a.float() @ b.float() + total


def interpreted(kernel: Any) -> Any:
    """Stands for a kernel: launched, its programs run one after another, the last one first."""

    class Launched:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(num_warps: int, maxnreg: int | None = None, launch_pdl: bool = False, **given: Any) -> None:
                given = {name: Pointer.to(one) if isinstance(one, Tensor) else one for name, one in given.items()}
                for program in reversed(range(grid[0])):
                    _function(kernel, Language(program), {})(**given)

            return launch

    return Launched()


def _function(kernel: Any, language: Language, known: dict[str, Any]) -> Any:
    """A kernel's Python function, in whose globals everything of Gluon's is replaced."""
    function = getattr(kernel, "fn", kernel)
    name = f"{function.__module__}.{function.__name__}"
    if name not in known:
        replaced: dict[str, Any] = {}
        known[name] = types.FunctionType(function.__code__, replaced, function.__name__, function.__defaults__)
        for word, held in function.__globals__.items():
            if held is gl:
                held = language
            elif word == "mma_v2":
                held = _mma
            elif isinstance(held, gl.constexpr):
                held = held.value
            elif type(held) is type(kernel) or isinstance(held, ConstexprFunction):
                held = _function(held, language, known)
            elif word == "_barrier":
                held = lambda: None  # noqa: E731
            replaced[word] = held
    return known[name]
