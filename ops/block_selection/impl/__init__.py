"""Implementations of block selection; they never import each other."""
