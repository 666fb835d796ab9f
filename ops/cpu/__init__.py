"""What several operations on a CPU share."""
