"""Matrix product with a weight that was reordered once for the CPU's vector units."""
