"""Graphs of Gaudi's lazy mode."""
