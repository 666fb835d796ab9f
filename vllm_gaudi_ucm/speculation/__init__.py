"""Speculative decoding: who proposes drafts, and how a step verifies them."""
