"""Adapters on a CPU."""
