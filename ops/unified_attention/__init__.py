"""Attention of a flat batch as a merge of causal, shared-block, unique-block and selected-block partial results."""
