"""The shape of a step: what decides which captured graph can replay it. Source: seed 001, last section."""

from __future__ import annotations

from typing import NamedTuple


def phase_string(causal: bool, shared: bool, unique: bool) -> str:
    """`csu` with `-` for each absent part: `--u` is a decode step, `c--` a step of fresh prompts."""
    return ("c" if causal else "-") + ("s" if shared else "-") + ("u" if unique else "-")


class Bucket(NamedTuple):
    """(phase, query_len, shared_blocks, unique_blocks, logits); tensor shapes are functions of it alone."""

    phase: str
    query_len: int
    shared_blocks: int
    unique_blocks: int
    logits: int
