"""Sets of buckets and usage for the tests of warm-up."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from tests.graphs.shapes import COST, forward_shapes, limits, steps
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.strategies import build_buckets
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest
from vllm_gaudi_ucm.graphs.warm_up.records import GraphKey

SERVER = Limits(2048, 64, 8192, 128, 3000)


def server_buckets(limits: Limits = SERVER, max_graphs: int = 64, strategy: str = "padding_aware") -> BucketSet:
    return build_buckets(strategy, BucketRequest(limits, COST, max_graphs))


@st.composite
def bucket_sets(draw: st.DrawFn) -> BucketSet:
    within = draw(limits())
    rows = draw(st.lists(st.integers(1, within.max_num_seqs), max_size=4))
    return BucketSet(draw(forward_shapes(within)), rows, within, COST)


@st.composite
def usages(draw: st.DrawFn, within: Limits) -> Steps | None:
    if draw(st.booleans()):
        return None
    return Steps.from_buckets(draw(st.lists(steps(within), max_size=8)))


def keys_of(buckets: BucketSet) -> list[GraphKey]:
    return [*buckets.forward, *buckets.logits]


def cheapest_warm(warm: Iterable[GraphKey], step: Bucket) -> Bucket:
    """By trying all of them."""
    known = list(warm)
    rows = min((key for key in known if isinstance(key, int) and key >= step.logits), default=0) if step.logits else 0
    shapes = [key for key in known if isinstance(key, ForwardShape) and dominates(key.step(rows), step)]
    return min(shapes, key=COST.forward).step(rows)
