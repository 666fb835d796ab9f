"""Implementations of state-space layers."""
