"""Optimises buckets for observed steps, with a bound on how far from the optimum they can be."""
