"""`gaudi-ucm calibrate`: measures the ranges of a model's layers, and writes them as Intel Neural Compressor does."""
