"""The face to vLLM: platform, worker, and what is refused by name."""
