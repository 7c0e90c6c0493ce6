"""The kernels: no device is named, every variant is a compile-time constant."""

from octavo_triton.kernels.decode import decode, split
from octavo_triton.kernels.prefill import cut, prefill
from octavo_triton.kernels.write import write

__all__ = ["cut", "decode", "prefill", "split", "write"]
