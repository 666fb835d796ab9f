"""Implementations of short convolutions."""
