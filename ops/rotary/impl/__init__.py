"""Implementations, a folder for each device."""
