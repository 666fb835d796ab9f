"""Partial hits: requests get copies of parts of blocks that others have computed."""
