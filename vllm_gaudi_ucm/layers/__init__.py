"""Layers of vLLM, registered in the place of its own."""
