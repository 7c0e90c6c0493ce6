"""The attention that FlashInfer compiles: its own, but that it takes no score of a key that is seen for a hidden key's.

FlashInfer hides a key by a score of -5e4, before the scale: real scores may be lower. Its attention variants are the
place for what differs (its `jit_args`). With a soft cap, which comes before keys are hidden, nothing is too low, and
its own is taken.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from octavo.attention.contract import AttentionSpec

SMALLER: Final = 64
"""What FlashAttention-2's kernel divides scores by and its scale is multiplied by: exact in float32, a power of two.

Not more: of a row all of whose keys in a tile are hidden the kernel computes exp2(-5e4 * scale - -5e4 * scale), once
rounded and once not.
"""
_FA2 = """
#include <flashinfer/attention/variants.cuh>
struct OctavoAttention : DefaultAttention<false, {window}, false, false> {{
  using DefaultAttention::DefaultAttention;
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx,
                            {{ return logits / {smaller}; }})
}};
"""
_FA3 = """
#include <flashinfer/attention/hopper/variants.cuh>
template <int ROWS>
struct OctavoSoftmax : OnlineSoftmax<ROWS, true> {
  using OnlineSoftmax<ROWS, true>::OnlineSoftmax;
  constexpr static float fill_value = -0x1p100f;  // times any scale it is exact
};
struct OctavoAttention : StandardAttention {
  using StandardAttention::StandardAttention;
  template <int ROWS>
  __device__ auto GetAttentionUpdater() {
    return OctavoSoftmax<ROWS>(sm_scale_log2);
  }
};
"""
"""FlashAttention-3's kernel lets a variant say what hides a key, so it has nothing to multiply."""


def jit_args(spec: AttentionSpec, kernel: str) -> list[Any] | None:
    """What the wrappers take under this name, for `kernel` "fa2" or "fa3"; None: FlashInfer's own attention."""
    if spec.softcap:
        return None
    windowed = spec.window is not None
    declared = _FA3 if kernel == "fa3" else _FA2.format(window=str(windowed).lower(), smaller=SMALLER)
    words = (str(dtype).removeprefix("torch.") for dtype in (spec.dtype, spec.kv_dtype))
    name = "_".join(["octavo", kernel, *words, str(spec.head_size), *["window"] * windowed])
    dtypes = (spec.dtype, spec.kv_dtype, spec.dtype, torch.int32)
    tensors: tuple[list[str], list[str]] = ([], [])
    scalars = (["sm_scale"], ["double"])
    no_positions = 0
    return [
        name, *dtypes, spec.head_size, spec.head_size, *tensors, *scalars, "OctavoAttention", declared,
        no_positions, windowed,
    ]  # fmt: skip


def run_args(spec: AttentionSpec, kernel: str) -> tuple[float, ...]:
    """What the kernel's `run` is given for the scalars that `jit_args` declare."""
    if spec.softcap:
        return ()
    return (spec.scale * SMALLER if kernel == "fa2" else spec.scale,)
