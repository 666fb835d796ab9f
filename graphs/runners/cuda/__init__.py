"""Graphs of CUDA."""
