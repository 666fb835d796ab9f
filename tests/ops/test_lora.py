"""Adapters of low rank against float64: every implementation, slices, garbage, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import adapters_cuda
from tests.ops.oracle import CUDA_RUNS, examples
from vllm_gaudi_ucm.batch import adapter_slots
from vllm_gaudi_ucm.ops.cpu.native.call_graph.call_graph import capture
from vllm_gaudi_ucm.ops.cpu.native.call_graph.memory import MemoryPool
from vllm_gaudi_ucm.ops.lora.api import add_adapters, add_up, begin_adapters, route_rows
from vllm_gaudi_ucm.ops.lora.impl.cuda import measure, ways
from vllm_gaudi_ucm.ops.lora.impl.cuda.products import CudaLora
from vllm_gaudi_ucm.ops.lora.impl.cuda.tiles import RowTiles, group_rows
from vllm_gaudi_ucm.ops.lora.impl.cuda.ways import Way, fastest_way, set_times
from vllm_gaudi_ucm.ops.lora.implementation import LORA
from vllm_gaudi_ucm.ops.lora.weights import NO_ADAPTER, AdapterWeights

GPU = torch.cuda.is_available()
# under Triton's interpreter its kernels alone
IMPLEMENTATIONS = (
    *(() if CUDA_RUNS and not GPU else ("reference", "stacked", "cpu")),
    *(("cuda",) if CUDA_RUNS else ()),
)


DEVICE = "cuda" if GPU else "cpu"
cuda_only = pytest.mark.skipif(not CUDA_RUNS, reason="needs a GPU or Triton's interpreter")


class Case(NamedTuple):
    """Rows, their slots, and the weights of all slots; all on the CPU."""

    y: Tensor
    x: Tensor
    rows: Tensor
    weights: AdapterWeights


def make_case(
    rows: int = 6,
    slots: int = 3,
    rank: int = 4,
    inputs: int = 24,
    outputs: Sequence[int] = (16, 8, 8),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    weights = AdapterWeights.zeros(inputs, outputs, slots, rank, dtype, torch.device("cpu"))
    for views in (*weights.down_of_slices(), *weights.up_of_slices()):
        # through the views by which adapters are written
        views.copy_(draw(*views.shape))
    chosen = torch.randint(NO_ADAPTER, slots, (rows,), generator=random)
    return Case(draw(rows, sum(outputs)), draw(rows, inputs), chosen, weights)


def oracle(case: Case, dtype: torch.dtype = torch.float64) -> Tensor:
    """Row by row, in float64; in another dtype for the error that honest arithmetic has there."""
    out, weights = case.y.to(dtype).clone(), case.weights
    for row, slot in enumerate(case.rows.tolist()):
        if slot == NO_ADAPTER:
            continue
        begin = 0
        for down, up in zip(weights.down_of_slices(), weights.up_of_slices(), strict=True):
            narrow = down[slot, 0].to(dtype) @ case.x[row].to(dtype)
            out[row, begin : begin + up.shape[2]] += up[slot, 0].to(dtype) @ narrow
            begin += up.shape[2]
    return out


def on_device(weights: AdapterWeights) -> AdapterWeights:
    return AdapterWeights(weights.down.to(DEVICE), weights.up.to(DEVICE), weights.slots, weights.outputs)


def joined(case: Case) -> AdapterWeights:
    """The adapters of a case with a random own weight of their layer."""
    weights, inputs = case.weights, case.x.shape[1]
    own = torch.randn(sum(weights.outputs), inputs, generator=torch.Generator().manual_seed(1)).to(case.x.dtype)
    found = AdapterWeights.joined_with(own.to(DEVICE), weights.outputs, weights.slots, weights.rank)
    found.copy_from(on_device(weights))
    return found


def run(case: Case, implementation: str) -> Tensor:
    device = "cuda" if GPU and implementation == "cuda" else "cpu"
    weights = case.weights
    weights = AdapterWeights(weights.down.to(device), weights.up.to(device), weights.slots, weights.outputs)
    routes = route_rows(case.rows.to(device), weights.slots, weights.rank, implementation=implementation)
    found = add_adapters(case.y.to(device, copy=True), case.x.to(device), routes, weights)
    assert (found.dtype, found.shape) == (case.y.dtype, case.y.shape)
    return found.cpu()


def assert_near(case: Case, found: Tensor) -> None:
    """Error <= 2 x (error of row-by-row arithmetic in the same dtype + an epsilon band).

    Triton's interpreter (3.9) cuts bf16 off where a GPU rounds, which is twice the error.
    """
    assert found.isfinite().all()
    exact = oracle(case)
    plain = (oracle(case, case.y.dtype).double() - exact).abs().max()
    band = 4 * torch.finfo(case.y.dtype).eps * exact.abs().max().clamp(min=1)
    cut = case.y.dtype == torch.bfloat16 and CUDA_RUNS and not GPU
    assert (found.double() - exact).abs().max() <= (4 if cut else 2) * (plain + band)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_add_their_own_adapter_cuda_and_others(implementation: str, dtype: torch.dtype) -> None:
    for rows in (1, 7):
        case = make_case(rows, dtype=dtype, seed=rows)
        assert_near(case, run(case, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_sizes_cuda_and_others(implementation: str, data: st.DataObject) -> None:
    """Sizes that no tile divides, one slot and many, more rows than a tile has, more slices than a kernel takes."""
    case = make_case(
        data.draw(st.integers(0, 90)),
        data.draw(st.integers(1, 20)),
        data.draw(st.sampled_from([1, 3, 8, 16])),
        data.draw(st.integers(1, 600)),
        data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5)),
        seed=data.draw(st.integers(0, 9)),
    )
    found = run(case, implementation)
    if len(found):
        assert_near(case, found)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_of_one_adapter_and_of_none_cuda_and_others(implementation: str) -> None:
    case = make_case()
    for slot in (NO_ADAPTER, 0, 2):
        alike = case._replace(rows=torch.full_like(case.rows, slot))
        found = run(alike, implementation)
        assert_near(alike, found)
        assert torch.equal(found, case.y) == (slot == NO_ADAPTER)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_garbage_stays_in_its_row_cuda_and_others(implementation: str) -> None:
    """NaN in a pad, in a row with an adapter, and so large an activation that another slot's product overflows."""
    case = make_case(6, dtype=torch.float16)
    case.rows[:] = torch.tensor([0, 1, NO_ADAPTER, 2, 0, 1])
    clean = run(case, implementation)
    case.x[2], case.x[3] = float("nan"), float("nan")
    found = run(case, implementation)
    rest = [0, 1, 2, 4, 5]
    assert torch.equal(found[rest], clean[rest])
    assert found[3].isnan().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_second_products_alone_cuda_and_others(implementation: str) -> None:
    """Embeddings compute them so: their first product is a look-up."""
    case = make_case(5, outputs=(40,))
    down = case.weights.down_of_slices()[0]
    narrow = torch.stack([down[max(slot, 0), 0] @ x for slot, x in zip(case.rows.tolist(), case.x, strict=True)])
    narrow[case.rows == NO_ADAPTER] = float("nan")
    device = "cuda" if GPU and implementation == "cuda" else "cpu"
    weights = AdapterWeights(
        case.weights.down.to(device), case.weights.up.to(device), case.weights.slots, case.weights.outputs
    )
    routes = route_rows(case.rows.to(device), weights.slots, weights.rank, implementation=implementation)
    assert_near(case, add_up(case.y.to(device, copy=True), narrow.to(device), routes, weights).cpu())


def test_rows_with_gaps_cuda_and_others() -> None:
    """Results that are the first columns of a wider tensor, as of a padded vocabulary."""
    case = make_case(5, outputs=(40,))
    wide = torch.full((5, 48), float("nan"))
    wide[:, :40] = case.y
    for implementation in IMPLEMENTATIONS:
        assert_near(case, run(case._replace(y=wide[:, :40]), implementation))


@cuda_only
def test_rows_are_grouped_by_adapter_cuda() -> None:
    """Tiles of one adapter each, none for rows without one, and as many as any step of this size may need."""
    for rows, slots in ((1, 3), (40, 3), (300, 20), (600, 2), (5, 1)):
        chosen = make_case(rows, slots, inputs=1, outputs=(1,)).rows
        tiles = group_rows(chosen.to(DEVICE), slots)
        order, owners = tiles.order.view(-1, tiles.height).cpu(), tiles.owners.cpu()
        used = int((owners >= 0).sum())
        assert (owners[used:] == -1).all()
        for slot in range(slots):
            members = order[:used][owners[:used] == slot].flatten()
            assert members[members >= 0].tolist() == (chosen == slot).nonzero().flatten().tolist()
        # every slot with a tile that holds a single row
        full = group_rows(torch.arange(slots, device=DEVICE).repeat(tiles.height + 1), slots)
        assert int((full.owners >= 0).sum()) == slots * -(-(tiles.height + 1) // full.height)


@cuda_only
def test_products_begun_ahead_of_the_layer_cuda() -> None:
    """The same numbers; and computed again if the layer has changed its input."""
    for rows in (1, 40):
        case = make_case(rows, rank=16, inputs=600)
        weights = on_device(case.weights)
        routes = route_rows(case.rows.to(DEVICE), weights.slots, weights.rank, implementation="cuda")
        x, other = case.x.to(DEVICE), case.x.to(DEVICE, copy=True)
        y = case.y.to(DEVICE)
        begun = begin_adapters(x, routes, weights)
        assert begun is not None
        expected = run(case, "cuda")
        assert torch.equal(add_adapters(y.clone(), x, routes, weights, begun).cpu(), expected)
        begun = begin_adapters(x * 3, routes, weights)
        assert torch.equal(add_adapters(y.clone(), other, routes, weights, begun).cpu(), expected)


@cuda_only
def test_products_joined_with_the_layers_own_cuda() -> None:
    """One product computes the layer and all slots, in steps of few rows and of many."""
    fastest = {way: (float(way is not Way.JOINED),) * len(ways.MEASURED_ROWS) for way in Way}
    set_times(fastest)
    try:
        for rows, dtype in ((1, torch.float32), (40, torch.float32), (300, torch.float16)):
            case = make_case(rows, rank=16, inputs=600, dtype=dtype, outputs=(24, 8, 16, 8))
            weights = joined(case)
            assert weights.joined is not None
            assert weights.joined.data_ptr() == weights.own.data_ptr()
            routes = route_rows(case.rows.to(DEVICE), weights.slots, weights.rank, implementation="cuda")
            x = case.x.to(DEVICE)
            own = torch.nn.functional.linear(x, weights.own)
            begun = begin_adapters(x, routes, weights)
            assert begun is not None
            assert begun.own is not None
            torch.testing.assert_close(begun.own, own, atol=0.02, rtol=1e-3)
            case = case._replace(y=begun.own.cpu().clone())
            assert_near(case, add_adapters(begun.own, x, routes, weights, begun).cpu())
            apart = on_device(case.weights)
            begun = begin_adapters(x, routes, apart)
            assert begun is None or begun.own is None
    finally:
        set_times({})


@cuda_only
def test_what_is_not_begun_cuda() -> None:
    """Inputs that the layer divides among ranks, rows with gaps between their numbers, and other implementations."""
    case = make_case(4)
    weights = on_device(case.weights)
    routes = route_rows(case.rows.to(DEVICE), weights.slots, weights.rank, implementation="cuda")
    x = case.x.to(DEVICE)
    assert begin_adapters(torch.cat((x, x), 1), routes, weights) is None
    assert begin_adapters(torch.cat((x, x), 1)[:, ::2], routes, weights) is None
    assert begin_adapters(x.unsqueeze(0), routes, weights) is None
    stacked = route_rows(case.rows.to(DEVICE), weights.slots, weights.rank, implementation="stacked")
    assert begin_adapters(x, stacked, weights) is None
    with pytest.raises(NotImplementedError, match="'stacked' begins no products"):
        stacked.implementation.finish(case.y, None, None, weights)


@cuda_only
def test_the_fastest_measured_way_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule decides until the ways are measured, in layers that compute both of them, once in a process."""
    assert [fastest_way(rows, joined=True) for rows in (1, 256, 257)] == 2 * [Way.PARALLEL] + [Way.IN_TURN]
    weights, calls = joined(make_case(rank=16)), list[tuple[Way, int]]()
    plain = CudaLora.layer

    def layer(self: CudaLora, own: Tensor, x: Tensor, routes: RowTiles, weights: AdapterWeights, way: Way) -> Tensor:
        calls.append((way, len(x)))
        return plain(self, own, x, routes, weights, way)

    def seconds(compute: Callable[[], object], stream: object) -> float:
        compute()
        way, rows = calls[-1]
        return {Way.PARALLEL: rows, Way.IN_TURN: 64.0, Way.JOINED: 1.5 if rows == 16 else 100.0}[way]

    monkeypatch.setattr(CudaLora, "layer", layer)
    monkeypatch.setattr(measure, "graph_seconds", seconds)
    monkeypatch.setattr(measure, "CALLS", 2)
    monkeypatch.setattr(measure, "MEASURED_ROWS", (1, 16, 100))
    monkeypatch.setattr(ways, "MEASURED_ROWS", (1, 16, 100))
    try:
        set_times(measure.measure_ways(weights, CudaLora("cuda").layer))
        assert set(calls) == {(way, rows) for way in Way for rows in (1, 16, 100)}
        expected = [Way.PARALLEL, Way.JOINED, Way.JOINED, Way.IN_TURN, Way.IN_TURN]
        assert [fastest_way(rows, joined=True) for rows in (1, 2, 16, 17, 5000)] == expected
        expected = 3 * [Way.PARALLEL] + 2 * [Way.IN_TURN]
        assert [fastest_way(rows, joined=False) for rows in (1, 2, 16, 17, 5000)] == expected
        count = len(calls)
        CudaLora("cuda").measure(weights)
        assert len(calls) == count
    finally:
        set_times({})


def test_a_rule_decides_if_the_ways_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measure, "measure_ways", fails)
    down = SimpleNamespace(device=torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        CudaLora("cuda").measure(cast(AdapterWeights, SimpleNamespace(down=down, outputs=(8,))))
    assert "out of memory" in caplog.text
    assert [fastest_way(rows, joined=True) for rows in (256, 257)] == [Way.PARALLEL, Way.IN_TURN]


@cuda_only
def test_the_layers_of_the_benchmark_cuda() -> None:
    """Each way computes what the reference does; an error is found."""
    sizes = {"qkv": (32, (32, 16, 16)), "o": (32, (32,)), "gate_up": (32, (64, 64)), "down": (64, (32,))}
    layer = adapters_cuda.make_layer(3, sizes, torch.device(DEVICE))
    slots = torch.tensor([0, 2, 1, 0, NO_ADAPTER], device=DEVICE)
    try:
        adapters_cuda.check(["stacked"], slots, layer)
        x, residual = torch.randn(2, 5, 32, dtype=torch.bfloat16, device=DEVICE).unbind()
        norm, found = torch.ones(32, dtype=torch.bfloat16, device=DEVICE), []
        for _, routes in adapters_cuda.ways(["reference"], slots, 3):
            found.append(adapters_cuda.decoder_layer(x.clone(), residual.clone(), norm, layer, routes).float())
        without = adapters_cuda.decoder_layer(x.clone(), residual.clone(), norm, layer, None).float()
        for one in found[:-1]:
            torch.testing.assert_close(one, found[-1], atol=0.1, rtol=0.05)
        assert (found[-1] - without)[:4].abs().amax(1).min() > 0.1
        weights = layer["o"].adapters
        weights.up.fill_(float("nan"))
        with pytest.raises(ValueError, match="o, 5 rows, in turn: found an error"):
            adapters_cuda.check([], slots, layer)
    finally:
        set_times({})


def test_a_pad_of_the_row_input_is_no_adapter() -> None:
    assert adapter_slots.NO_ADAPTER == adapter_slots.AdapterSlots.pad == NO_ADAPTER


def test_what_is_chosen() -> None:
    assert LORA.choose("auto", "cpu").name == "cpu"
    assert LORA.choose("auto", "cpu", captured=True).name == "stacked"
    assert LORA.choose("auto", "hpu", captured=True).name == "stacked"
    with pytest.raises(ValueError, match="reads tensors on the host"):
        LORA.choose("cpu", "cpu", captured=True)


def test_a_traced_layer_has_its_adapters() -> None:
    """Whichever adapters the first step had: a graph that was traced without one serves all of them."""
    case = make_case()

    def layer(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        return LORA.make("stacked").add(y, x, mask, case.weights)

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for slot in (NO_ADAPTER, 0, 2):
        rows = torch.full_like(case.rows, slot)
        found = compiled(case.y.clone(), case.x, route_rows(rows, 3, 4, implementation="stacked").form)
        assert_near(case._replace(rows=rows), found)


def test_adapters_are_in_no_native_graph() -> None:
    """Which rows an adapter gets differs from step to step."""
    case = make_case()
    routes = route_rows(case.rows, 3, 4)
    assert capture(lambda: add_adapters(case.y, case.x, routes, case.weights), MemoryPool(), {}).graph is None


def test_tensors_that_do_not_fit() -> None:
    case = make_case()
    routes = route_rows(case.rows, 3, 4)
    with pytest.raises(ValueError, match=r"found y, x of shapes \(6, 32\), \(6, 20\), expected \(6, 32\), \(6, 24\)"):
        add_adapters(case.y, case.x[:, :20], routes, case.weights)
    with pytest.raises(ValueError, match=r"found y, x of shapes \(5, 32\), \(5, 24\), expected \(6, 32\)"):
        add_adapters(case.y[:5], case.x[:5], routes, case.weights)
    with pytest.raises(ValueError, match="expected one device"):
        add_adapters(case.y, case.x.to("meta"), routes, case.weights)
