"""Fast ways of a step on a CPU."""
