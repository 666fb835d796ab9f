"""Fast paths for steps on a CPU."""
