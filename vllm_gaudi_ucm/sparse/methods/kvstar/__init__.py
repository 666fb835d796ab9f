"""KVStar: a selection that stays locked over several steps."""
