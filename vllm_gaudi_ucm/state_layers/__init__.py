"""Layers of vLLM that keep a state for each request, computed by our operations."""
