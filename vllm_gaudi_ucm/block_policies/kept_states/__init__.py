"""Prefix caching of models with layers that keep a state: states behind some blocks."""
