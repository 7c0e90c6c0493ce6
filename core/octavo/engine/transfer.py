"""Arrays to the device and back, without waiting for it where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 16
"""Bytes: where an array begins in what is sent, so that any dtype may be read there."""


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Tensors of the same shapes and dtypes on a device; on a CPU they share the arrays' memory.

    All arrays go together, from memory that the device reads by itself: each transfer costs the host microseconds, and
    one from ordinary memory may wait for what the device still computes.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    pin = pins(device)
    return views(staged(arrays, pin=pin).to(device, non_blocking=pin), arrays)


def tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """One array, of the same shape and dtype on a device."""
    return upload([array], device)[0]


def column(values: NDArray[Any], device: torch.device) -> Tensor:
    """Values [rows] as float32 [rows, 1] on a device."""
    return tensor(values.astype(np.float32), device)[:, None]


def pins(device: torch.device) -> bool:
    """Does it read memory of the host by itself? Elsewhere a transfer is over before what is sent may be let go."""
    return device.type == "cuda"


def staged(arrays: Sequence[NDArray[Any]], *, pin: bool) -> Tensor:
    """uint8 [bytes]: the arrays one after another. `pin`: in memory that the device reads by itself."""
    starts = _starts(arrays)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
    places = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        places[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def views(packed: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """The arrays' tensors within what `staged` made of them, wherever it has gone."""
    return [
        packed[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for start, array in zip(_starts(arrays), arrays, strict=False)
    ]


def _starts(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Where each begins, and the end of all."""
    starts: list[int] = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
    return starts


_DTYPES = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Download:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin: what the tensors hold by now, as the device counts, is what arrives."""
        self._event: torch.cuda.Event | None = None
        if not tensors or not pins(tensors[0].device):
            self._tensors = [tensor.to("cpu", copy=True) for tensor in tensors]
            return
        self._tensors = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    def arrays(self) -> list[NDArray[Any]]:
        """They have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
