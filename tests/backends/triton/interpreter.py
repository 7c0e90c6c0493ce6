"""Triton's interpreter, made to compute what a GPU computes, and to see where a kernel reads.

Seen in Triton 3.6 to 3.8: bfloat16 is held as its bits and computed as integers, without an error; from numpy 2.4 on a
loaded number cannot bound a loop (3.6); every call of a nested function patches the language anew; and an address
outside of all tensors is read as it is. `interpreted` mends all four; and its products depend on where a row stands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_FOLDERS = ("triton.language", "octavo_triton.kernels", "octavo.models.product_kernels")
"""Modules whose compiled functions are interpreted."""
_known: dict[int, Any] = {}


@contextmanager
def interpreted() -> Iterator[None]:
    """Within, kernels and the language's own functions are interpreted, though they were imported to be compiled."""
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    _mend()
    swapped = [
        (module, name, found)
        for path, module in list(sys.modules.items())
        if path.startswith(_FOLDERS)
        for name, found in list(vars(module).items())
        if isinstance(found, JITFunction)
    ]
    for module, name, found in swapped:
        setattr(module, name, _known.setdefault(id(found), InterpretedFunction(found.fn)))
    knobs.runtime.interpret = True
    try:
        yield
    finally:
        knobs.runtime.interpret = False
        os.environ.pop("TRITON_INTERPRET", None)  # the setting writes it, and what is started here would read it
        for module, name, found in swapped:
            setattr(module, name, found)


class OutOfBounds(AssertionError):
    """A kernel reads or writes beside its tensors."""


def widen(bits: NDArray[Any]) -> NDArray[np.float32]:
    """bfloat16, given as its bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: Any) -> NDArray[np.uint16]:
    """To the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _mend() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "mended", False):
        return
    builder.mended = True
    for mend in (_mend_arithmetic, _mend_types, _mend_conversions, _mend_sums, _guard):
        mend(tl, interpreter, builder)
    _mend_loops(interpreter)
    _mend_speed(tl, interpreter)


def is_bf16(tensor: Any) -> bool:
    """Is it, of the interpreter's tensors?"""
    return bool(tensor.dtype.scalar.name == "bf16")


def value(tensor: Any) -> Any:
    """Its numbers."""
    return widen(tensor.data) if is_bf16(tensor) else tensor.data


def _mend_arithmetic(tl: Any, interpreter: Any, builder: Any) -> None:
    handle = interpreter.TensorHandle
    binary, unary, ternary = builder.binary_op, builder.unary_op, builder.ternary_op

    def packed(result: Any, dtype: Any) -> Any:
        return handle(result if result.dtype == np.bool_ else narrow(result), dtype)

    def binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
        if is_bf16(a) and is_bf16(b) and op not in (np.bitwise_and, np.bitwise_or, np.bitwise_xor):
            return packed(op(value(a), value(b)), tl.bfloat16)
        return binary(self, a, b, op)

    def unary_op(self: Any, a: Any, op: Any) -> Any:
        return packed(op(value(a)), tl.bfloat16) if is_bf16(a) else unary(self, a, op)

    def ternary_op(self: Any, a: Any, b: Any, c: Any, op: Any) -> Any:
        if is_bf16(c) and op is not np.where:
            return packed(op(value(a), value(b), value(c)), tl.bfloat16)
        return ternary(self, a, b, c, op)

    builder.binary_op, builder.unary_op, builder.ternary_op = binary_op, unary_op, ternary_op
    builder.create_fneg = lambda self, a: self.unary_op(a, np.negative)


def _mend_types(tl: Any, interpreter: Any, builder: Any) -> None:
    """The interpreter's list of types lacks the float8 with one zero, which the language's own has."""
    patch, to_ir = interpreter._patch_lang_core, tl.dtype.to_ir

    def patched(language: Any, scope: Any) -> None:
        patch(language, scope)
        scope.set_attr(language.dtype, "to_ir", to_ir)

    interpreter._patch_lang_core = patched


def _mend_conversions(tl: Any, interpreter: Any, builder: Any) -> None:
    handle = interpreter.TensorHandle
    cast, convert = builder.cast_impl, builder.create_fp_to_fp
    float8 = {
        tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.float8e4b8: torch.float8_e4m3fnuz,
    }  # fmt: skip

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        dtype = target.scalar
        if is_bf16(source) and dtype != tl.bfloat16:
            return handle(widen(source.data).astype(interpreter._get_np_dtype(dtype)), dtype)
        if dtype == tl.bfloat16 and not is_bf16(source):
            return handle(narrow(source.data.astype(np.float32)), dtype)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.dtype.scalar == tl.float8e4b8:  # whose NaN lies where others have -0
            held = torch.from_numpy(np.ascontiguousarray(source.data)).view(float8[source.dtype.scalar])
            return self.create_fp_to_fp(handle(held.float().numpy(), tl.float32), target, rounding)
        if target.scalar == source.dtype.scalar:
            return source
        if target.scalar == tl.bfloat16 and source.dtype.scalar in (tl.float32, tl.float16, tl.float64):
            return handle(narrow(source.data.astype(np.float32)), target.scalar)
        if target.scalar in float8:  # its own has no carry from the mantissa into the exponent
            bits = torch.from_numpy(np.ascontiguousarray(value(source), dtype=np.float32)).to(float8[target.scalar])
            return handle(bits.view(torch.uint8).numpy(), target.scalar)
        return convert(self, source, target, rounding)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    builder.get_bf16 = lambda self, number: handle(narrow(np.array([number], dtype=np.float32)), tl.bfloat16)


def _mend_sums(tl: Any, interpreter: Any, builder: Any) -> None:
    handle, total = interpreter.TensorHandle, interpreter.ReduceOps.sum

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        # A matrix unit gives a row of a product the same bits wherever it stands; numpy's own product does not.
        left, right = (value(each).astype(np.float32) for each in (a, b))
        return handle(np.einsum("ik,kj->ij", left, right) + d.data, tl.float32)

    def reduced_sum(self: Any, given: Any) -> Any:
        if given.dtype != tl.bfloat16:
            return total(self, given)
        summed = np.sum(widen(given.handle.data), axis=self.axis, keepdims=self.keep_dims, dtype=np.float32)
        return self.to_tensor(narrow(summed), tl.bfloat16)

    builder.create_dot = create_dot
    interpreter.ReduceOps.sum = reduced_sum


def _mend_loops(interpreter: Any) -> None:
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patched


def _mend_speed(tl: Any, interpreter: Any) -> None:
    """The same results with half the time: most of it goes by beside the numbers."""
    _patch_once(tl, interpreter)
    # Whether integers overflow is worked out at every sum, in the interpreter, and asserted only where `debug` is set.
    running = interpreter.interpreter_builder
    assert not running.options.debug
    running.options = replace(running.options, sanitize_overflow=False)

    find = interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        """The table that it is looked up in is made anew for each call."""
        name = dtype.scalar.name
        if name not in types:
            types[name] = find(dtype)
        return types[name]

    make = tl.tensor.__init__
    sizes: dict[Any, Any] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        """A tensor's shape is a tuple of the language's, which is made out of many objects: one for all of a shape."""
        shape = type.shape if type.is_block() else ()
        if shape in sizes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = sizes[shape]
        else:
            make(self, handle, type)
            sizes[shape] = (self.shape, self.numel)

    interpreter._get_np_dtype, tl.tensor.__init__ = numpy_type, made


def _patch_once(tl: Any, interpreter: Any) -> None:
    """Once the language is patched, a nested call need not do it again."""
    patch = interpreter._patch_lang
    active: set[int] = set()

    class Nothing:
        def restore(self) -> None: ...

    def patched(function: Any) -> Any:
        held = (id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if not (new := [one for one in held if one not in active]):
            return Nothing()
        scope = patch(function)
        active.update(new)
        restore: Callable[[], None] = scope.restore

        def restored() -> None:
            active.difference_update(new)
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patched


def _guard(tl: Any, interpreter: Any, builder: Any) -> None:
    """Every load, store and atomic stays inside the storage of a tensor that the kernel was given."""
    ranges: list[tuple[int, int]] = []
    convert, call = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def converted(argument: Any) -> Any:
        if hasattr(argument, "untyped_storage"):
            storage = argument.untyped_storage()
            ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        return convert(argument)

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        ranges.clear()
        return call(self, *arguments, **named)

    def check(pointers: Any, mask: Any, what: str) -> None:
        at = np.asarray(pointers.data, dtype=np.uint64)
        at = at if mask is None else at[np.broadcast_to(np.asarray(mask.data, bool), at.shape)]
        if outside := _outside(at, max(1, pointers.get_element_ty().primitive_bitwidth // 8), ranges):
            raise OutOfBounds(f"{what}: {outside} of {at.size} elements lie outside of all tensors")

    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "load")
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "store")
        return store(self, pointers, value, mask, *rest)

    def atomic_rmw(self: Any, op: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointer, mask, "atomic")
        return atomic(self, op, pointer, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.create_atomic_rmw = atomic_rmw
    interpreter._implicit_cvt, interpreter.GridExecutor.__call__ = converted, called


def _outside(at: NDArray[np.uint64], size: int, ranges: list[tuple[int, int]]) -> int:
    """How many elements of so many bytes at these addresses lie in none of the ranges."""
    if not at.size:
        return 0
    first, end = int(at.min()), int(at.max()) + size
    if any(low <= first and end <= high for low, high in ranges):  # all in one tensor, as nearly always
        return 0
    inside = np.zeros(at.shape, bool)
    for low, high in ranges:
        inside |= (at >= np.uint64(low)) & (at + np.uint64(size) <= np.uint64(high))
    return int((~inside).sum())
