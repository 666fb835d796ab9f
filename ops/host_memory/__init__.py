"""How the host's allocator treats the memory of intermediate results."""
