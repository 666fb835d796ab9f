"""Triton kernels of quantised linear layers."""
