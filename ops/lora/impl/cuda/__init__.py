"""Adapters on a GPU."""
