"""Implementations of the KV-cache operations; they never import each other."""
