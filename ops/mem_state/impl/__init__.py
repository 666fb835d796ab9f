"""Implementations of `ops/mem_state`; none imports another."""
