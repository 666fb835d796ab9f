"""Implementations of RMSNorm with a gate."""
