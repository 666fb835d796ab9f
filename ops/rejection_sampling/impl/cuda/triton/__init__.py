"""Rejection sampling in Triton. Imported by the CUDA implementation alone: triton is optional."""
