"""FLOPs, bytes and modelled time of operator streams, against counts by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_gaudi_ucm.graphs.cost.specs import device_spec
from vllm_gaudi_ucm_tools.op_cost.operator_cost import LINE, OperatorTrace, StreamCost, memory_traffic, trace
from vllm_gaudi_ucm_tools.op_cost.work import CHIPS, Work

MB = 1 << 20
MANY = 1 << 40


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def traced(run: Callable[..., object], *args: object) -> OperatorTrace:
    return trace(run, *args)


def names(found: OperatorTrace) -> list[str]:
    return [operation.name for operation in found.operations]


def test_flops_of_products_and_elements_of_the_rest() -> None:
    found = traced(lambda a, b: torch.exp(a @ b), meta(4, 64, 128), meta(4, 128, 32))
    assert names(found) == ["aten.bmm.default", "aten.exp.default"]
    assert [operation.matrix for operation in found.operations] == [2 * 4 * 64 * 128 * 32, 0]
    assert [operation.vector for operation in found.operations] == [0, 4 * 64 * 32]


def test_float32_is_twice_the_vector_work() -> None:
    assert traced(torch.exp, meta(10, dtype=torch.float32)).operations[0].vector == 20


def test_views_and_allocations_are_no_operators() -> None:
    def run(x: Tensor) -> Tensor:
        torch.empty_like(x)
        return x.view(-1)[2:].unflatten(0, (-1, 2)).transpose(0, 1)

    assert names(traced(run, meta(4, 4))) == []


def test_an_intermediate_that_fits_makes_no_traffic() -> None:
    """Read once, write once; twice as much for what does not fit."""
    size = 8 * MB
    out, x = meta(size // 2), meta(size // 2)
    found = traced(lambda x, out: out.copy_(torch.exp(x * 2)), x, out)
    assert len(found.operations) == 3
    assert memory_traffic(found, 64 * MB) == 2 * size
    assert memory_traffic(found, 2 * LINE) == 6 * size
    assert StreamCost.from_trace(found, MANY).touched == 6 * size


def test_a_result_that_nobody_reads_again_is_not_written_back() -> None:
    size = 8 * MB
    found = traced(lambda x: (torch.exp(x), torch.exp(x))[0] * 1, meta(size // 2))
    assert memory_traffic(found, 64 * MB) == size


def test_what_was_thrown_out_is_read_again() -> None:
    """Two inputs that fit one at a time, in turns."""
    size = 4 * MB
    found = traced(lambda a, b: [torch.sum(x) for x in (a, b, a, b)], meta(size // 2), meta(size // 2))
    assert memory_traffic(found, 16 * MB) == 2 * size
    # some of the second one is still there once the first is not needed any more
    assert 3 * size < memory_traffic(found, size + MB) <= 4 * size


def test_a_gather_reads_the_chosen_rows_only() -> None:
    cache, index = meta(64, MB // 2), torch.empty(2, dtype=torch.int64, device="meta")
    found = traced(lambda cache, index: cache.index_select(0, index).sum(), cache, index)
    assert memory_traffic(found, MANY) == 2 * MB + 16
    everything = torch.empty(64, dtype=torch.int64, device="meta")
    assert memory_traffic(traced(lambda c, i: c.index_select(0, i).sum(), cache, everything), MANY) == 64 * (MB + 8)


def test_a_scatter_writes_the_chosen_rows_only() -> None:
    index = torch.empty(2, dtype=torch.int64, device="meta")
    cache, rows = meta(64, MB // 2), meta(2, MB // 2)
    found = traced(lambda c, i, s: c.index_add_(0, i, s), cache, index, rows)
    assert memory_traffic(found, MANY) == 3 * 2 * MB + 16, "an addition reads what the rows held"
    found = traced(lambda c, i, s: c.index_copy_(0, i, s), cache, index, rows)
    assert memory_traffic(found, MANY) == 2 * 2 * MB + 16
    assert found.operations[0].vector == 0, "nothing is computed"


def test_overlapping_windows_count_once() -> None:
    found = traced(lambda x: x.unfold(0, 4 * MB, MB).sum(), meta(8 * MB))
    assert found.operations[0].reads[0].used == 16 * MB


def test_time_is_that_of_the_slowest_engine() -> None:
    gaudi2, chip = device_spec("gaudi2"), CHIPS["gaudi2"]
    assert Work(gaudi2.flops, gaudi2.bandwidth / 2, chip.vector / 4).seconds(gaudi2) == pytest.approx(1)
    assert Work(gaudi2.flops, gaudi2.bandwidth * 2, chip.vector / 4).seconds(gaudi2) == pytest.approx(2)
    assert Work(gaudi2.flops, gaudi2.bandwidth * 2, chip.vector * 4).seconds(gaudi2) == pytest.approx(4)


def test_real_tensors_are_traced_alike() -> None:
    """On the CPU the operators are computed, and their stream is the same."""

    def run(x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), -1) @ x

    assert traced(run, torch.randn(2, 8, 16)).operations == traced(run, meta(2, 8, 16, dtype=torch.float32)).operations
