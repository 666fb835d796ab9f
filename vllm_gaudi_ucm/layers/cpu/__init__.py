"""Layers of vLLM for a CPU."""
