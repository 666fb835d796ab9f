"""The write to the KV cache in a compiled graph: the one form that Gaudi's compiler carries out in place.

Its pass takes an `index_copy` whose target is an input of the graph, not a view of one, and has two users: the
`index_copy` and the `copy_` with which functionalisation ends (gaudi-pytorch-bridge, pass_reinplace_index_copy_ops).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from vllm.forward_context import set_forward_context

from tests.engine.serving import Engine
from tests.ops.batch import Batch, Request, Shape, build
from vllm_gaudi_ucm.attention.backend import UnifiedAttentionImpl, UnifiedAttentionMetadata
from vllm_gaudi_ucm.execution.attention_group import step_metadata
from vllm_gaudi_ucm.kv_cache.allocation import attention_layers
from vllm_gaudi_ucm.kv_cache.pair import KvPair, in_blocks
from vllm_gaudi_ucm.ops.unified_attention.api import prepare
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.selection.block_selector import SelectionLayer
from vllm_gaudi_ucm.sparse.selection.sparse_worker import BlockSelection, ServerSizes

ATEN = torch.ops.aten
BLOCK_SIZE = 16
MIXED = [Request(9, 1, prefix=0), Request(20, 1, prefix=1), Request(16, 5, prefix=1), Request(0, 11)]
SHAPE = Shape(heads=4, kv_heads=2, dim=16, value_dim=16, block_size=BLOCK_SIZE, poison=0.0)


NAME = "model.layers.0.self_attn.attn"
UCM = {"graphs": {"mode": "off"}, "cpu": {"packed_weights": False}}


class Graphs:
    """A backend of torch.compile that runs functionalised graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.found: list[GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self._take, keep_inference_input_mutations=True)

    def _take(self, graph: GraphModule, inputs: Any) -> Any:
        self.found.append(graph)
        return make_boxed_func(graph.forward)

    def writes(self, shape: torch.Size) -> list[tuple[Node, Node, Node]]:
        """(input, what is written to it, `copy_` at the end) of all inputs of this shape that a graph changes."""
        nodes = [node for graph in self.found for node in graph.graph.nodes if node.target is ATEN.copy_.default]
        written = [(cast(Node, node.args[0]), cast(Node, node.args[1]), node) for node in nodes]
        return [one for one in written if one[0].op == "placeholder" and one[0].meta["val"].shape == shape]


def check_writes(graphs: Graphs, pair: KvPair) -> None:
    """Of one layer, whose keys and values have one shape, as no other input of the graphs has."""
    writes = graphs.writes(pair.key.shape)
    assert len({target for target, _, _ in writes}) == len(writes) == 2, "each cache is written once"
    for target, written, end in writes:
        assert written.target is ATEN.index_copy.default
        assert written.args[0] is target, "the target is a view"
        # the old name has no other user, so attention reads the result, if anything
        assert set(target.users) == {written, end}
        assert len(written.users) >= 2, "nothing reads what was written"


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def pair_of(batch: Batch) -> KvPair:
    """The caches of the step, before it wrote to them."""
    pair = KvPair(batch.key_cache.flatten(0, 1).clone(), batch.value_cache.flatten(0, 1).clone())
    for rows in pair:
        rows[batch.slots] = 0
        rows.nan_to_num_(0)
    return pair


@pytest.mark.parametrize("implementation", ["reference", "hpu"])
def test_a_layers_attention_writes_each_cache_once(implementation: str, graphs: Graphs) -> None:
    """The same bits as without a compiler, in the caches, too."""
    batch = build(MIXED, SHAPE)
    layer = UnifiedAttentionImpl(4, 16, 0.25, 2)
    metadata = step_metadata(batch.slots, batch.parts, BLOCK_SIZE, implementation, None)

    def attend(query: Any, key: Any, value: Any, pair: KvPair, out: Any) -> Any:
        return layer.forward(cast(Any, None), query, key, value, pair, metadata, out)

    found = []
    for run in (attend, torch.compile(attend, backend=graphs.backend, dynamic=False)):
        pair = pair_of(batch)
        with torch.inference_mode():
            out = run(batch.query, batch.key, batch.value, pair, torch.empty_like(batch.query))
        found.append((out, *pair))
    for one, other in zip(*found, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    check_writes(graphs, pair)


def test_summaries_are_made_of_what_was_written(graphs: Graphs) -> None:
    """A sparse layer reads the keys of full blocks: of the result, too, and not through a view that it has kept."""
    batch = build(MIXED, SHAPE)
    method = UcmSparseFactory.create_sparse_method("GSA", UcmSparseRole.WORKER, {})
    assert isinstance(method, BlockSparse)
    full = torch.tensor([1, 3])
    found = []
    for compiles in (False, True):
        pair = pair_of(batch)
        blocks = in_blocks(pair, BLOCK_SIZE)
        sizes = ServerSizes(256, 4, 1, BLOCK_SIZE, len(blocks.key), static=True)
        selector = BlockSelection.from_layers(method, [SelectionLayer(blocks.key, 0.25)], sizes).selector
        prepared = prepare(batch.parts, BLOCK_SIZE, implementation="hpu")
        metadata = UnifiedAttentionMetadata(batch.slots, prepared, method, full)
        layer = UnifiedAttentionImpl(4, 16, 0.25, 2)
        layer.be_sparse(0, selector.layers[0])

        def attend(
            out: Any, layer: Any = layer, pair: KvPair = pair, metadata: UnifiedAttentionMetadata = metadata
        ) -> Any:
            return layer.forward(None, batch.query, batch.key, batch.value, pair, metadata, out)

        run = torch.compile(attend, backend=graphs.backend, dynamic=False) if compiles else attend
        with torch.inference_mode():
            run(torch.empty_like(batch.query))
        found.append((*pair, *selector._summaries))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert all(summaries[full].any() for summaries in found[1][2:])
    check_writes(graphs, pair)


def test_a_decoder_layer_of_vllm_writes_each_cache_once(tiny_llama: Path, graphs: Graphs) -> None:
    """The pair reaches the graph through vLLM's own layer, to which it was bound: its tensors are inputs."""
    batch = build(MIXED, SHAPE)
    rows = len(batch.slots)
    with Engine(tiny_llama, UCM) as engine, torch.inference_mode():
        model, config = cast(Any, engine.runner.decoder.model), engine.llm.llm_engine.vllm_config
        pairs = engine.runner.parts.kv_caches
        for name, layer in attention_layers(config).items():
            assert cast(Any, layer).kv_cache is pairs[name]
        metadata = step_metadata(batch.slots, batch.parts, BLOCK_SIZE, "hpu", None)
        positions, hidden = torch.arange(rows), torch.randn(rows, 64)
        decoder = model.model.layers[0]
        answers = []
        for run in (decoder, torch.compile(decoder, backend=graphs.backend, dynamic=False)):
            for pair in pairs.values():
                for cache in pair:
                    cache.zero_()
            with set_forward_context(metadata, config, num_tokens=rows, slot_mapping={}):
                answers.append(
                    (
                        *run(positions, hidden.clone(), None),
                        *(cache.clone() for cache in pairs[NAME]),
                    )
                )
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    check_writes(graphs, pairs[NAME])
