"""Compares the parts of vLLM that this package uses with any version's sources: `python -m scripts.drift --help`.

Everything is read by syntax tree. Neither vLLM nor torch is imported, so a version need not be installed.
"""
