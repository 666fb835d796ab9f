"""What a step takes in the bucket that it is padded to, for the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import LimitsError

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.lookup import BucketSet
    from vllm_gaudi_ucm.sparse.step_sizes import StepSizes


class BucketSeconds:
    """See StepSeconds. Modelled, as the choice of buckets is; all of them count as warm.

    Args:
        buckets: those of the workers, where nothing is read as a slice of the cache, and no token has a slot.
    """

    def __init__(self, buckets: BucketSet) -> None:
        self._buckets = buckets

    def __call__(self, sizes: StepSizes) -> float | None:
        shape = ForwardShape.of(sizes.has_prompt, sizes.rows, sizes.shared, sizes.unique, sizes.selected)
        try:
            bucket = self._buckets.lookup(shape.step(0)).forward
        except LimitsError:
            return None
        return float(self._buckets.cost.forward_seconds("c" in bucket.phase, *bucket.sizes))
