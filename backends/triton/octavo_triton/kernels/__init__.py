"""The kernels: no device is named, every variant is a compile-time constant.

Numbers that change from step to step are not specialized: none of them has a kernel compiled anew.
"""

from octavo_triton.kernels.decode import decode, split
from octavo_triton.kernels.prefill import cut, prefill
from octavo_triton.kernels.write import write

__all__ = ["cut", "decode", "prefill", "split", "write"]
