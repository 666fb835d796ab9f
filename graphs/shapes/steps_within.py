"""Observed steps as a server with limits of its own takes them."""

from __future__ import annotations

import numpy as np

from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import Steps


def steps_within(steps: Steps, limits: Limits) -> Steps:
    """The steps, their blocks cut to what `limits` allow.

    They may be those of a larger cache, of one that was read in slices, which cover blocks that nobody uses, or of a
    server that did not divide steps with many shared blocks. Rows and requests stay as they are: more than the limits
    allow are another server's (see `check_steps`). How far rows look back is left out where buckets do not bound it.
    """
    most = limits.maximum
    shapes = steps.shapes
    shapes[:, 2:5] = np.minimum(shapes[:, 2:5], [most.shared_blocks, most.unique_blocks, most.selected_blocks])
    cut = steps.with_shapes(shapes)
    return cut if limits.causal_reach else cut.without_reach()
