"""Kernels of the KV-cache operations in Triton. Imported by the CUDA implementations alone: triton is optional."""
