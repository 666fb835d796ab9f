"""State-space layers on a GPU."""
