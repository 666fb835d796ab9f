"""Which cached blocks a sparse request attends to: summaries of blocks, their scores for a query, and the choice."""
