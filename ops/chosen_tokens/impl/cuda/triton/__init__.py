"""Kernels of chosen tokens in Triton. Imported by the CUDA implementation alone: triton is optional."""
