"""A look-up among warm buckets, as an execution makes it."""

from __future__ import annotations

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets


def look_up(ready: ReadyBuckets, step: Bucket) -> Bucket:
    """The bucket that the step runs in; where a cheaper one is cold, the step counts for it."""
    best, found = ready.state.lookup(step)
    if found != best:
        ready.count(best, found)
    return found
