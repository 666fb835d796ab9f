"""Slots for tokens: requests get strips of slots."""
