"""The slot that is never free."""

DUMMY_SLOT = 0
