"""Which blocks requests get: copies of partial blocks, and what the worker does with the scheduler's orders."""
