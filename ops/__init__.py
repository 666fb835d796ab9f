"""Attention mathematics and KV-cache operations: pure functions on tensors."""
