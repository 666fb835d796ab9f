"""Triton kernels that several operations share."""
