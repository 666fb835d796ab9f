"""Short convolutions on a GPU."""
