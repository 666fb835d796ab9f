"""Implementations of unified attention; they never import each other."""
