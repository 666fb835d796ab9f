"""A captured function gives at replay what the function itself gives, or says that it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from vllm_gaudi_ucm.ops.cpu.native import library
from vllm_gaudi_ucm.ops.cpu.native.call_graph.call_graph import MOST_OPERATIONS, CpuGraph, Operation, capture
from vllm_gaudi_ucm.ops.cpu.native.call_graph.memory import MemoryPool
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import can_pack, pack, packed_linear
from vllm_gaudi_ucm.ops.rms_norm.impl.cpu.norm import rms_norm
from vllm_gaudi_ucm.ops.rotary.impl.cpu.rotary import rotate
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cpu.gate import silu_and_mul

pytestmark = pytest.mark.skipif(library.native() is None, reason=library.why_not_native())
SIZE, VOCABULARY = 64, 50


def small_model(seed: int = 0) -> Callable[[Tensor, Tensor], Tensor]:
    """Token ids and positions through what a decoder has besides attention, three layers of it."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    table, angles, norm = random(VOCABULARY, SIZE), random(32, 16), random(SIZE)
    weights = [(pack(random(4 * SIZE, SIZE)), pack(random(SIZE, 2 * SIZE))) for _ in range(3)]

    def run(ids: Tensor, positions: Tensor) -> Tensor:
        x = embedding(ids, table)
        residual = x.new_empty(x.shape).copy_(x)
        for up, down in weights:
            query, key = x.split([SIZE // 2, SIZE // 2], -1)
            rotate(query, key, positions, angles, 16)
            x = packed_linear(silu_and_mul(packed_linear(x, up)), down)
            x = rms_norm(x, norm, 1e-5, residual)
        return x

    return run


def captured(run: Callable[[], Tensor], pool: MemoryPool | None = None) -> CpuGraph:
    found = capture(run, pool or MemoryPool(), {})
    assert found.graph is not None, found.refused
    return found.graph


@pytest.mark.skipif(not can_pack(torch.zeros(1)), reason="oneDNN is missing")
@torch.inference_mode()
def test_replays_give_the_bits_of_the_function_on_new_inputs() -> None:
    """Graphs of several sizes in one pool, in turns; results are poisoned before."""
    model, pool = small_model(), MemoryPool()
    inputs = {rows: (torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)) for rows in (1, 3, 16)}
    graphs = {}
    for rows, given in inputs.items():
        graphs[rows] = captured(lambda given=given: model(*given), pool)  # type: ignore[misc]
    size = pool.nbytes
    for turn in range(12):
        rows = [1, 3, 16][turn % 3]
        ids, positions = inputs[rows]
        ids.random_(VOCABULARY)
        positions.random_(32)
        graphs[rows].result.fill_(torch.nan)
        assert graphs[rows].replay()
        assert torch.equal(graphs[rows].result, model(ids, positions))
    assert pool.nbytes == size, "replays allocate nothing"
    with pytest.raises(IndexError):
        model(ids.clone(), positions.clone().fill_(99))
    positions.fill_(99)
    assert not graphs[rows].replay(), "the function itself says what is wrong"


@pytest.mark.parametrize("order", ["ascending", "descending", "mixed"])
@torch.inference_mode()
def test_graphs_of_all_sizes_take_little_more_than_the_largest(order: str) -> None:
    """covers: F11"""
    model, pool = small_model(), MemoryPool()
    sizes = {"ascending": range(1, 65), "descending": range(64, 0, -1), "mixed": [1 + 37 * i % 64 for i in range(64)]}
    inputs = {rows: (torch.arange(rows) % VOCABULARY, torch.arange(rows) % 32) for rows in sizes[order]}
    graphs = {}
    for rows, given in inputs.items():
        graphs[rows] = captured(lambda given=given: model(*given), pool)  # type: ignore[misc]
    alone = MemoryPool()
    captured(lambda: model(*inputs[64]), alone)
    assert pool.nbytes <= 1.2 * alone.nbytes
    outside = [tensor for graph in graphs.values() for tensor in kept_by(graph) if pool.unkept(tensor) is tensor]
    assert not outside, "what a graph has made lies in the pool"
    for rows in inputs:
        assert graphs[rows].replay()
        assert torch.equal(graphs[rows].result, model(*inputs[rows]))


def kept_by(graph: CpuGraph) -> list[Tensor]:
    """The results that a graph writes to."""
    made = [part.result for part in graph._parts if isinstance(part, Operation) and part.result is not None]
    return [graph.result, *made]


@torch.inference_mode()
def test_what_a_function_keeps_of_the_captured_run_is_not_lent() -> None:
    """A table that a model fills the first time it runs."""
    pool, tables = MemoryPool(), []

    def run(x: Tensor) -> Tensor:
        if not tables:
            tables.append(silu_and_mul(torch.full((4, 64), 2.0)))
        return silu_and_mul(x) + tables[0][: len(x)]

    for rows in (2, 3, 4):
        captured(lambda rows=rows: run(torch.randn(rows, 64)), pool).replay()  # type: ignore[misc]
    assert torch.equal(tables[0], silu_and_mul(torch.full((4, 64), 2.0)))


@torch.inference_mode()
def test_the_run_that_is_captured_gives_the_functions_result() -> None:
    model = small_model()
    ids, positions = torch.arange(5), torch.arange(5)
    found = capture(lambda: model(ids, positions), MemoryPool(), {})
    assert torch.equal(found.result, model(ids, positions))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * float(x[0, 0]), "reads values on the host"),
        (lambda x: torch.stack([x + i for i in range(MOST_OPERATIONS + 1)]), "operations of torch"),
        (lambda x: x.max(1)[0], "several results"),
    ],
)
def test_what_cannot_be_replayed_is_refused(function: Callable[[Tensor], Tensor], reason: str) -> None:
    x = torch.randn(3, 8)
    found = capture(lambda: function(x), MemoryPool(), {})
    assert found.graph is None
    assert reason in found.refused
    assert torch.equal(found.result, function(x))


@pytest.mark.skipif(not can_pack(torch.zeros(1)), reason="oneDNN is missing")
@torch.inference_mode()
def test_operations_on_opaque_weights_are_replayed() -> None:
    """More rows than native kernels take: oneDNN multiplies."""
    weight, x = pack(torch.randn(32, 48)), torch.randn(100, 48)
    graph = captured(lambda: silu_and_mul(packed_linear(x, weight)))
    x.normal_()
    assert graph.replay()
    assert torch.equal(graph.result, silu_and_mul(packed_linear(x, weight)))


def test_operations_that_write_in_place_are_replayed() -> None:
    x, total = torch.ones(2, 8), torch.zeros(2, 8)
    graph = captured(lambda: total.add_(x).mul_(2.0))
    total.fill_(5.0)
    assert graph.replay()
    assert bool((total == 12.0).all())


def test_kernels_of_other_threads_are_not_recorded() -> None:
    """Threads that move blocks or load call kernels at any time."""
    x, other = torch.randn(2, 8), torch.randn(4, 16)
    results = []

    def both() -> Tensor:
        thread = threading.Thread(target=lambda: results.append(silu_and_mul(other)))
        thread.start()
        thread.join()
        return silu_and_mul(x)

    graph = captured(both)
    results[0].fill_(torch.nan)
    assert graph.replay()
    assert bool(results[0].isnan().all())
    assert torch.equal(graph.result, silu_and_mul(x))


def test_an_error_while_capturing_leaves_the_kernels_as_they_were() -> None:
    def fails() -> Tensor:
        silu_and_mul(torch.randn(2, 8))
        raise RuntimeError("in the middle")

    plain = library.native()
    with pytest.raises(RuntimeError, match="in the middle"):
        capture(fails, MemoryPool(), {})
    assert library.native() is plain
