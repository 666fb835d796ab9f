"""CUDA graphs."""
