"""Recipes of a device with lazy execution, counted on any device: which are compiled after warm-up."""
