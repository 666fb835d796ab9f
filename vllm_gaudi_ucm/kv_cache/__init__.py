"""Device memory: how much of it the KV cache gets, and the views of it that layers read."""
