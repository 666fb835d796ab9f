"""The modelled seconds of a compilation: the figures on record, bounds in order, and nodes of one layer alone."""

from __future__ import annotations

import pytest

from vllm_gaudi_ucm.graphs.cost.specs import DEVICES
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm_tools.buckets.compile_cost import (
    COMPILE_COSTS,
    CUDA_CAPTURE,
    DECODE_NODES,
    GAUDI_COMPILE,
    LAYER_NODES,
    LOGITS_NODES,
    MOST_NODES,
    OUTER_NODES,
    CompileCost,
    Spread,
    graph_nodes,
    most_attention_nodes,
)
from vllm_gaudi_ucm_tools.buckets.plan_memory import GRAPH_BYTES

DECODES, PROMPTS = ForwardShape("-su", 64, 10, 100), ForwardShape("c--", 64, 0, 0)


def test_the_bounds_go_through_the_figures_on_record() -> None:
    """A whole model of 32 layers of 50 nodes: 72 graphs in 49 s, and 38 s for one."""
    model = GAUDI_COMPILE.seconds(32 * 50)
    assert 72 * model.low == pytest.approx(49.0)
    assert model.high == pytest.approx(38.0)
    per_layer = GAUDI_COMPILE.per_node.times(50)
    assert GAUDI_COMPILE.fixed.low == pytest.approx(10 * per_layer.low)
    assert GAUDI_COMPILE.fixed.high == pytest.approx(60 * per_layer.high)


def test_more_nodes_take_longer_on_a_gaudi_and_not_where_nothing_is_compiled() -> None:
    few, many = (GAUDI_COMPILE.seconds(nodes) for nodes in (100, 50_000))
    assert 0 < few.low < few.high
    assert few.low < many.low
    assert few.high < many.high
    assert CUDA_CAPTURE.seconds(100) == CUDA_CAPTURE.seconds(50_000)
    assert COMPILE_COSTS["cpu"].seconds(100) == Spread(0.0, 0.0)
    assert COMPILE_COSTS["gaudi2"] == COMPILE_COSTS["gaudi3"] == GAUDI_COMPILE
    assert set(COMPILE_COSTS) == set(GRAPH_BYTES) == set(DEVICES)


def test_nodes_of_a_graph() -> None:
    """Of one layer's attention and its surroundings; logits have a graph of their own."""
    assert graph_nodes(DECODES) == DECODE_NODES + LAYER_NODES + OUTER_NODES
    assert graph_nodes(PROMPTS) == MOST_NODES + LAYER_NODES + OUTER_NODES
    assert graph_nodes(64) == graph_nodes(1) == LOGITS_NODES
    assert graph_nodes(DECODES, lambda shape: shape.unique_blocks) == 100 + LAYER_NODES + OUTER_NODES
    assert most_attention_nodes(DECODES.with_selected(10)) == MOST_NODES


def test_spreads_are_added_by_bound() -> None:
    cost = CompileCost(Spread(1.0, 10.0), Spread(0.5, 2.0))
    assert cost.seconds(4) == Spread(3.0, 18.0)
    assert cost.seconds(0).times(3) + Spread(0.5, 0.5) == Spread(3.5, 30.5)
