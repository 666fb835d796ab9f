"""What several operations on a Gaudi share."""
