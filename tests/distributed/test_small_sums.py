"""Sums of small tensors: which way they are computed, and on two GPUs that they are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.processes import on_ranks
from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.distributed.small_sums import SIZES, SmallSums, Way, fastest_ways, small_sums


class Recorded(SmallSums):
    """Sums whose ways are noted and not computed."""

    def by(self, way: Way, own: Tensor) -> Tensor:
        return torch.full_like(own, list(Way).index(way))


@pytest.mark.parametrize(("elements", "way"), [(8, 1), (2048, 1), (2056, 2), (4096, 2), (4104, None), (1 << 20, None)])
def test_a_size_between_two_goes_as_the_larger_one(elements: int, way: int | None) -> None:
    ways = dict.fromkeys(SIZES, Way.NCCL) | {SIZES[0]: Way.ONE_SHOT, SIZES[1]: Way.TWO_SHOTS}
    found = Recorded(torch.empty(0), "", ways)(torch.zeros(elements, dtype=torch.bfloat16))
    assert (None if found is None else int(found[0])) == way


def test_what_loads_cannot_cover_goes_to_nccl() -> None:
    """Rows that are no multiple of a load, strided ones, and none."""
    sums = Recorded(torch.empty(0), "", dict.fromkeys(SIZES, Way.ONE_SHOT))
    tensor = torch.zeros(64, dtype=torch.bfloat16)
    assert sums(tensor) is not None
    assert [sums(one) for one in (tensor[:7], tensor[::2], tensor[:0])] == [None] * 3


@given(st.data())
def test_the_fastest_way_of_a_size_is_chosen(data: st.DataObject) -> None:
    times = {way: data.draw(st.lists(st.floats(1e-6, 1e-3), min_size=9, max_size=9)) for way in Way}
    for place, (size, way) in enumerate(fastest_ways(times, Ranks()).items()):
        assert size == SIZES[place]
        assert times[way][place] <= min(found[place] for found in times.values()) + 1e-9


def slowest_decides(rank: int, size: int, group: dist.ProcessGroup) -> dict[int, Way]:
    times = {way: [1e-5] * len(SIZES) for way in Way}
    # fast for the first rank, slow for the second
    times[Way.ONE_SHOT] = [(1e-6, 1e-4)[rank]] * len(SIZES)
    times[Way.TWO_SHOTS] = [8e-6] * len(SIZES)
    return fastest_ways(times, Ranks(rank, size, group=group))


@pytest.mark.slow
def test_all_ranks_choose_by_the_slowest_of_them(tmp_path: Path) -> None:
    assert on_ranks(slowest_decides, 2, tmp_path) == [dict.fromkeys(SIZES, Way.TWO_SHOTS)] * 2


def sums_of(rank: int, size: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns own tensors, their sums, and the sums of a replayed graph, for each way and some sizes."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    cards = dist.new_group(backend="nccl")
    sums = small_sums(device, cards, Ranks(rank, size, group=group))
    assert sums is not None, "memory is shared"
    random, found = torch.Generator().manual_seed(rank), []
    for way in (Way.ONE_SHOT, Way.TWO_SHOTS):
        for dtype, elements in ((torch.bfloat16, 4096), (torch.float32, 8 * 4096), (torch.bfloat16, 1 << 19)):
            own = torch.randn(elements, generator=random).to(device, dtype)
            plain, graph = sums.by(way, own), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = sums.by(way, own)
            graph.replay()
            found.append((own.cpu(), plain.cpu(), captured.cpu()))
    torch.cuda.synchronize()
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sums_over_two_gpus(tmp_path: Path) -> None:
    """Each way gives the rounded sum, with the same bits on both ranks and in a graph."""
    for first, second in zip(*on_ranks(sums_of, 2, tmp_path), strict=True):
        expected = (first[0].double() + second[0].double()).to(first[0].dtype)
        for one in (*first[1:], *second[1:]):
            assert torch.equal(one, expected)
