"""Helpers of `test_cuda_attention.py` that other tests use, too."""

from __future__ import annotations

from tests.ops.batch import Request

# Decodes with and without a shared prefix, a prompt with a context, one without, a verification with a choice.
MIXED = [
    Request(9, 1, prefix=2),
    Request(12, 1, prefix=3, chosen=frozenset({0, 1})),
    Request(0, 1),
    Request(8, 7, prefix=2),
    Request(19, 4, chosen=frozenset({1, 2}), dropped=frozenset({0, 3})),
    Request(0, 11),
]
