"""Warm-up: which graphs are made ready before serving starts, and which when the device is idle."""
