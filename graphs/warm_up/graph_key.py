"""What a graph is found by: forward graphs by their shape, those for tails too, graphs of logits by their rows."""

from __future__ import annotations

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.tail_shapes import TailShape

BucketKey = ForwardShape | int
"""The buckets: forward shapes, and rows of logits and sampling."""
GraphKey = BucketKey | TailShape


def graph_name(key: GraphKey) -> str:
    """The key in words, for a log or an error."""
    if isinstance(key, TailShape):
        return f"tail {' '.join(map(str, key.forward.to_list()))}"
    if isinstance(key, ForwardShape):
        return f"bucket {' '.join(map(str, key.to_list()))}"
    return f"{key} logits row{'s' if key != 1 else ''}"
