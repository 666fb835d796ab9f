"""Estimates the time to compile a graph from its number of nodes: two bounds, modelled on the few published figures.

There are no published figures of seconds per node for Gaudi's graph compiler. The bounds are straight lines through
figures of vllm-gaudi; the distance between them shows how little is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape


@dataclass(frozen=True)
class Spread:
    """A lower and an upper bound, modelled."""

    low: float
    high: float

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.low + other.low, self.high + other.high)

    def times(self, count: float) -> Spread:
        return Spread(self.low * count, self.high * count)


@dataclass(frozen=True)
class CompileCost:
    """Seconds of one graph: fixed + per_node * nodes. fixed: for tracing, guards, allocation and a first launch."""

    fixed: Spread
    per_node: Spread

    def seconds(self, nodes: int) -> Spread:
        return self.fixed + self.per_node.times(nodes)


# The figures are for whole models in lazy mode: about 32 layers (Llama 3.1 8B) of about 50 nodes. Both are inferred.
_LAYERS, _NODES_OF_LAYER = 32, 50
# vllm-gaudi, docs/features/warmup.md: 24 prompt and 48 decode buckets in 49 s.
_FASTEST = 49.0 / (24 + 48)
# vllm-fork, issue 201: one prompt bucket of 512 to 1024 tokens takes 14 to 38 s.
_SLOWEST = 38.0
# The fixed part, in layers. vllm-gaudi, pull request 1638: every layer of Gemma 4 E4B used to be compiled separately,
# and then one for all; prompts went from 12 to 3 minutes and decodes from 28 to 18. With 35 layers (inferred) a layer
# takes (12 - 3) / 34 and (28 - 18) / 34 minutes, and the fixed part is as large as 10 and 60 of them.
_FIXED_LAYERS = (10, 60)


def _line_through(seconds: float, fixed_layers: int) -> tuple[float, float]:
    """Returns (fixed, per node) with which the whole model takes these seconds."""
    per_layer = seconds / (fixed_layers + _LAYERS)
    return fixed_layers * per_layer, per_layer / _NODES_OF_LAYER


_LOW, _HIGH = _line_through(_FASTEST, _FIXED_LAYERS[0]), _line_through(_SLOWEST, _FIXED_LAYERS[1])
# 0.16 to 25 s, and 0.32 to 8.3 ms for each node.
GAUDI_COMPILE = CompileCost(Spread(_LOW[0], _HIGH[0]), Spread(_LOW[1], _HIGH[1]))
# A CUDA graph is captured, not compiled.
CUDA_CAPTURE = CompileCost(Spread(0.3, 0.3), Spread(0.0, 0.0))
NO_COMPILATION = CompileCost(Spread(0.0, 0.0), Spread(0.0, 0.0))
COMPILE_COSTS = {"gaudi2": GAUDI_COMPILE, "gaudi3": GAUDI_COMPILE, "h200": CUDA_CAPTURE, "cpu": NO_COMPILATION}
"""Compilation and capture of one new shape, by the name of a `DeviceSpec`."""

# The most nodes of a layer's attention, in decode buckets and in any bucket: the limits that the hpu implementation
# must meet.
DECODE_NODES, MOST_NODES = 60, 150
# Nodes of a layer around its attention: products, norms, rotary embedding, gate, cache writes; all in torch's form.
LAYER_NODES = 60
# Embedding and final norm are compiled once, and so is the graph that computes and samples logits.
OUTER_NODES, LOGITS_NODES = 12, 60

AttentionNodes = Callable[[ForwardShape], int]
"""Nodes of one layer's attention in a bucket."""


def most_attention_nodes(shape: ForwardShape) -> int:
    """Returns the most nodes that the implementation may have; counting them would need torch, and seconds."""
    return MOST_NODES if "c" in shape.phase or shape.selected_blocks else DECODE_NODES


def graph_nodes(key: ForwardShape | int, attention: AttentionNodes = most_attention_nodes) -> int:
    """Returns the nodes that are compiled for a forward shape, or for a number of logits rows.

    One decoder layer is compiled for all layers, so the number of layers does not count.
    """
    return LOGITS_NODES if isinstance(key, int) else attention(key) + LAYER_NODES + OUTER_NODES
