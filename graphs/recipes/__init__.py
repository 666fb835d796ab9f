"""Recipes as a device with lazy execution would form them, counted on any device: what is compiled after warm-up."""
