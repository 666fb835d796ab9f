"""Implementation of attention over chosen tokens for CUDA."""
