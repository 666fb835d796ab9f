"""Random numbers of a request's own: a function of its seed, of its position and of the token, and of nothing else."""
