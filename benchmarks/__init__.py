"""Measurements against the peers; each module prints one table of ratios and asserts no times."""
