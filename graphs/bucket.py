"""The shape of a step: what decides which captured graph can replay it. Source: seed 001, last section."""

from __future__ import annotations

from typing import NamedTuple


def phase_string(causal: bool, shared: bool, unique: bool) -> str:
    """`csu` with `-` for each absent part: `--u` is a decode step, `c--` a step of fresh prompts."""
    return ("c" if causal else "-") + ("s" if shared else "-") + ("u" if unique else "-")


class ForwardShape(NamedTuple):
    """What a forward graph is captured for: (phase, query_len, shared_blocks, unique_blocks)."""

    phase: str
    query_len: int
    shared_blocks: int
    unique_blocks: int

    @classmethod
    def of(cls, causal: bool, query_len: int, shared_blocks: int, unique_blocks: int) -> ForwardShape:
        """The shape whose phase has `s` and `u` exactly where it has such blocks."""
        return cls(phase_string(causal, shared_blocks > 0, unique_blocks > 0), query_len, shared_blocks, unique_blocks)


class Bucket(NamedTuple):
    """(phase, query_len, shared_blocks, unique_blocks, logits); tensor shapes are functions of it alone."""

    phase: str
    query_len: int
    shared_blocks: int
    unique_blocks: int
    logits: int

    @property
    def forward(self) -> ForwardShape:
        """The key of the forward graph; the graph of logits and sampling has `logits` alone for its key."""
        return ForwardShape(*self[:4])


def dominates(bucket: Bucket, step: Bucket) -> bool:
    """Whether `step` can run in `bucket`: every dimension is as large, and no part of its phase is missing.

    A part that the bucket has and the step has not is legal: it runs over empty ranges.
    """
    return all(have in (part, "-") for have, part in zip(step.phase, bucket.phase, strict=True)) and all(
        size <= room for size, room in zip(step[1:], bucket[1:], strict=True)
    )
