"""What a graph is found by: forward graphs by their shape, graphs of logits and sampling by their rows."""

from __future__ import annotations

from vllm_gaudi_ucm.graphs.bucket import ForwardShape

GraphKey = ForwardShape | int


def graph_name(key: GraphKey) -> str:
    """The key in words, for a log or an error."""
    if isinstance(key, ForwardShape):
        return f"bucket {' '.join(map(str, key.to_list()))}"
    return f"{key} logits row{'s' if key != 1 else ''}"
