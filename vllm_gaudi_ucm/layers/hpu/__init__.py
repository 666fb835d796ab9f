"""Layers of vLLM for a Gaudi."""
