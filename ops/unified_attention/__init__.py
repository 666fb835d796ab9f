"""Attention of a flat batch as a merge of causal, shared-block and unique-block partial results."""
