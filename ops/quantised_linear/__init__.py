"""Linear layers whose weights a checkpoint stores as numbers of 4 or 8 bits with scales."""
