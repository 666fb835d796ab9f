"""Short convolutions over the last rows of each request."""
