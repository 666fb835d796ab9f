"""Observed steps as a server with limits of its own takes them."""

from __future__ import annotations

import numpy as np

from vllm_gaudi_ucm.graphs.limits import Limits
from vllm_gaudi_ucm.graphs.steps import Steps


def steps_within(steps: Steps, limits: Limits) -> Steps:
    """The steps, their blocks cut to what `limits` allow.

    They may be those of a larger cache, of one that was read in slices, which cover blocks that nobody uses, or of a
    server that did not divide steps with many shared blocks. Rows and requests stay as they are: more than the limits
    allow are another server's (see `check_steps`).
    """
    most = limits.maximum
    sizes = [1, steps.forward.max(initial=1), most.shared_blocks, most.unique_blocks, most.selected_blocks]
    shapes = np.minimum(steps.shapes, sizes)
    distinct, places = np.unique(shapes, axis=0, return_inverse=True)
    counts = np.zeros(len(distinct), np.int64)
    np.add.at(counts, places.reshape(-1), steps.forward_counts)
    return Steps(distinct[:, :4], counts, steps.logits, steps.logits_counts, distinct[:, 4])
