"""Buckets that are optimal for observed steps, with a bound that says how far from the optimum they can be."""
