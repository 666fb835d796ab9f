"""Implementations of attention over chosen tokens."""
