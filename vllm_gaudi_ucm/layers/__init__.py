"""Replacements of vLLM's layers."""
