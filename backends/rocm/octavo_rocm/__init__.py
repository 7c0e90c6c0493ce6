"""Paged attention on AMD GPUs: the shared Triton kernels, with tiles that were compiled and counted for each chip."""
