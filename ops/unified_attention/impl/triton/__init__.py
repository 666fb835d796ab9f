"""Kernels of Unified Attention in Triton, one per file. Imported by `impl/cuda.py` alone: triton is an optional package."""
