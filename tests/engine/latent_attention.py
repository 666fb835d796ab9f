"""Helpers of `test_latent_attention.py` that other tests use, too."""

from __future__ import annotations

STATIC = {"graphs": {"mode": "eager", "max_graphs": 6, "recipe_check": "fail"}}


CHOICE = {"sparse_ratio": 1.0, "sparse_steps": "always", "min_tokens": 32, "local_window_sz": 1, "min_blocks": 2}
