"""Implementations of adapters of low rank."""
