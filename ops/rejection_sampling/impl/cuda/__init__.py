"""Kernels in Triton, for a GPU."""
