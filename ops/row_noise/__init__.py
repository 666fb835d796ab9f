"""Random numbers for each request: a function of its seed, the position and the token only."""
