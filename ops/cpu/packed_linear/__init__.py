"""Matrix product with a weight that was reordered once, for the vector units of the CPU."""
