"""Which blocks requests get: parts of blocks as copies, blocks from host memory, blocks that follow each other."""
