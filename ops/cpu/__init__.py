"""Code that several operations share on a CPU."""
