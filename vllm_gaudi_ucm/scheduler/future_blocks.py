"""The most blocks of the KV cache that requests will use at one time, if they run on as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNKNOWN = 1 << 40
"""Steps until a request begins, where nobody knows."""


class Footprint(NamedTuple):
    """What a request has, and what it will have.

    blocks: ids of its blocks, in any order, each once; a prefix that requests share is in each of them.
    tokens: of its context as it is, those included that are still to be computed.
    left: tokens that it will generate at most. delay: steps at most until it generates the first.
    """

    blocks: Sequence[int]
    tokens: int
    left: int
    delay: int = 0


def peak_blocks(footprints: Sequence[Footprint], block_size: int, *, in_step: bool = True) -> int:
    """Distinct blocks at the time of the most.

    Each request generates one token a step once its delay is over, keeps its blocks until its last token, and shares
    what it shares now. A request is at its largest when it ends, so only the ends are looked at.

    in_step: False where requests generate different numbers of tokens in a step: then all are at their largest at once.
    Source: the admission of LightLLM's TokenAttention, there in tokens, without shared prefixes and delays.
    """
    if not footprints:
        return 0
    ordered = sorted(footprints, key=lambda one: one.delay + one.left, reverse=True)
    held = np.array([len(one.blocks) for one in ordered])
    tokens, left = (np.array([one[place] for one in ordered], np.int64) for place in (1, 2))
    ends = np.array([one.delay + one.left for one in ordered], np.int64)
    # a shared block is counted where it is held longest
    distinct = np.array(_distinct([one.blocks for one in ordered]))
    if not in_step:
        return int(distinct[-1] + _more(tokens + left, held, block_size).sum())
    # [end, request]: those that end later are still there, and have generated as much as the time allows
    growth = _more(tokens + np.minimum(ends[:, None], left), held, block_size)
    return int((distinct + np.tril(growth).sum(1)).max())


def _more(tokens: np.ndarray, held: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks for so many tokens beyond those that are held."""
    return np.maximum(-(-tokens // block_size) - held, 0)


def _distinct(blocks: Sequence[Sequence[int]]) -> list[int]:
    """Distinct blocks of the first request, of the first two, and so on."""
    seen: set[int] = set()
    counts = []
    for own in blocks:
        seen.update(own)
        counts.append(len(seen))
    return counts
