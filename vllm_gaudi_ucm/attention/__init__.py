"""The vLLM attention backend: a thin adapter over the operation `ops.unified_attention`."""
