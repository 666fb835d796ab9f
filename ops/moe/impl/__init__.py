"""Implementations of the mixture of experts."""
