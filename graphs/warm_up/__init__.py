"""Warm-up: which graphs are made ready before serving starts, and which while there is nothing else to do."""
