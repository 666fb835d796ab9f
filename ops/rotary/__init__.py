"""Rotary position embedding of query and key heads."""
