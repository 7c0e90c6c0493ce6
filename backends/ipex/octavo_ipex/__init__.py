"""Paged attention on Intel's CPUs and GPUs: the kernels of its extension for PyTorch, without its Python package."""
