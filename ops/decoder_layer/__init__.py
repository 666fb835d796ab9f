"""What a decoder layer computes before and after its attention, for a few rows."""
