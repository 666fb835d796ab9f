"""Layers quantised by ranges that Intel Neural Compressor (INC) measured: its files, its scales, and the layers."""
