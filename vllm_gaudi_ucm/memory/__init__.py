"""Which blocks requests get: copies of partial blocks, blocks from host memory; what the worker does about them."""
