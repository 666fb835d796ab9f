"""Counts, on any device, the recipes that a device with lazy execution would compile after warm-up."""
