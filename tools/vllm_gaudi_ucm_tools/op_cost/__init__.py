"""`gaudi-ucm op-cost`."""
