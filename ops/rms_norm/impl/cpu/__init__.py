"""Native kernels and torch's own operators, for a CPU."""
