"""Paged attention on NVIDIA GPUs: the shared Triton kernels, with what was measured on each architecture."""
