"""Rejection sampling: accepts drafts that were drawn from a distribution of their own, or draws another token."""
