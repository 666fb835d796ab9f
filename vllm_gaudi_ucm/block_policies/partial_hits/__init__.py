"""Partial hits: parts of blocks that others have computed, as copies."""
