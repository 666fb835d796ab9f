"""Native kernels and torch's own, for a CPU."""
