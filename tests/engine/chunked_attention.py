"""Helpers of `test_chunked_attention.py` that other tests use, too."""

from __future__ import annotations

# vLLM switches it on for long contexts alone, Transformers always
TUNED = {"override_generation_config": {"attn_temperature_tuning": True}}
