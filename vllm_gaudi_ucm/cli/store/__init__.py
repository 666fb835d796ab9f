"""`gaudi-ucm store`."""
