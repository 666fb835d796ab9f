"""Chooses the cached blocks that a sparse request attends to: block summaries, their scores for a query, the choice."""
