"""What several operations on a GPU share."""
