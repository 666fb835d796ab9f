"""Layers of vLLM for a GPU."""
