"""Our scheduler class, and what it is composed of."""
