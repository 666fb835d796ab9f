"""`gaudi-ucm sparse-report`."""
