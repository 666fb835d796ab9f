"""The most blocks of the KV cache that requests will probably use at one time, by how long answers were so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_gaudi_ucm.scheduler.future_blocks import in_windows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.scheduler.future_blocks import Footprint
    from vllm_gaudi_ucm.scheduler.output_lengths import OutputLengths

TIMES = 64
"""Times that are looked at, closer to each other the sooner they are."""


def expected_peak(
    footprints: Sequence[Footprint], lengths: OutputLengths, block_size: int, deviations: float, least: int
) -> float:
    """Blocks that are probably enough at any one time: what is expected, and so many standard deviations more.

    At each time an answer is there with the probability that `lengths` knows, apart from the others; their sum is taken
    to be normal. Blocks that requests share now are taken to stay. Delays are not looked at.

    least: tokens that every answer is taken to have still, at least.
    """
    tokens = np.array([one.tokens for one in footprints], np.int64)
    left = np.array([one.left for one in footprints], np.int64)
    generated = np.array([one.generated for one in footprints], np.int64)
    later = np.unique(np.r_[0, np.geomspace(1, max(1, int(left.max())), TIMES).astype(np.int64)])
    alive = lengths.alive(generated, np.maximum(later - least, 0))
    alive *= later <= left[:, None]
    holders = Counter(block for one in footprints for block in one.blocks)
    shared = {block for block, count in holders.items() if count > 1}
    of_others = np.array([len(shared.intersection(one.blocks)) if shared else 0 for one in footprints])
    held = np.array([len(one.blocks) for one in footprints])
    blocks, whole = -(-(tokens[:, None] + later) // block_size), np.array([one.whole for one in footprints])
    sizes = np.maximum(blocks * whole[:, None], held[:, None]) - of_others[:, None]
    sizes += in_windows(blocks.T, np.array([one.windows for one in footprints], np.int64)).T
    mean = (alive * sizes).sum(0)
    deviation = np.sqrt((alive * (1 - alive) * sizes**2).sum(0))
    return float(len(shared) + (mean + deviations * deviation).max())
