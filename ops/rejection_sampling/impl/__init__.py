"""Implementations, with a folder for each device."""
