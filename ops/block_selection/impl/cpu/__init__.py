"""Block selection on a CPU: native kernels and torch's own operators."""
