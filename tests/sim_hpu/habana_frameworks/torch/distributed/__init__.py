"""Collectives between cards."""
