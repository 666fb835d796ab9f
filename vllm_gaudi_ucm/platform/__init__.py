"""The parts that vLLM calls: the platform, the worker, and the refusals."""
