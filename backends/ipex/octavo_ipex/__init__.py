"""Paged attention on Intel processors: the kernels of Intel's extension for PyTorch, without its Python package."""
