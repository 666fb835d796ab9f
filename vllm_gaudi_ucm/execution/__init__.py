"""Computes a planned step: at its true shape, or padded to a bucket and replayed."""
