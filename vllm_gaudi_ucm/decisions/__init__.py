"""Decisions made before a step exists, used by the worker, by doctor and by plan."""
