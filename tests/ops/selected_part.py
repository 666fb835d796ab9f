"""Helpers of `test_selected_part.py` that other tests use, too."""

from __future__ import annotations

from tests.ops.batch import Request


def _set(*indices: int) -> frozenset[int]:
    return frozenset(indices)


# Decodes and verifications with and without a choice, a prompt, a shared prefix of which each chose other blocks.
MIXED = [
    Request(21, 1, prefix=3, chosen=_set(1, 3), dropped=_set(2)),
    Request(17, 1, prefix=3, chosen=_set(0, 2)),
    Request(9, 1),
    Request(19, 4, chosen=_set(1, 2), dropped=_set(0, 3)),
    Request(18, 2, prefix=2, chosen=_set(0, 1)),
    Request(0, 9),
    Request(8, 5, prefix=1),
]
