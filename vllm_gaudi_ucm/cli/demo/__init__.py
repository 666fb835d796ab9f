"""`gaudi-ucm demo`."""
