"""What the card does to memory, copies, streams and processes: each rule with a violation that it must catch."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

PT_HPU_LAZY_MODE = "0"
MIB = 1 << 20


@pytest.fixture
def duties(card: Any) -> Any:
    if card is None:
        return None
    from habana_frameworks.torch.simulator import duties

    return duties


def now(x: Tensor) -> list[float]:
    """What the card's memory holds at this moment; waits for nothing."""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        return x.flatten()[:2].tolist()


@pytest.mark.parametrize(
    "name",
    [
        *("empty_cache", "empty_host_cache", "get_memory_info"),
        *("memory_stats", "memory_reserved", "reset_peak_memory_stats"),
    ],
)
def test_torch_accelerator_has_no_allocator(
    name: str, forbidden: Any, duties: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5, until somebody replaces the call."""
    if not hasattr(torch.accelerator, name):
        pytest.skip("this torch has no such call")
    with forbidden(f"torch.accelerator.{name}: Allocator for hpu is not a DeviceAllocator"):
        getattr(torch.accelerator, name)()
    monkeypatch.setattr(torch.accelerator, name, lambda: 7)
    assert getattr(torch.accelerator, name)() == 7


def test_number_formats(card: Any, duties: Any, forbidden: Any) -> None:
    """26"""
    with forbidden("torch.complex64 does not exist on the card"):
        torch.ones(2, dtype=torch.complex64).to("hpu")
    with duties.without(40), forbidden("torch.complex64 does not exist on the card"):
        torch.view_as_complex(torch.ones(2, 2, device="hpu"))
    assert torch.ones(2, dtype=torch.float16, device="hpu").tolist() == [1, 1]
    card.accepts_float16 = False
    with forbidden("torch.float16 does not exist"):
        torch.ones(2, dtype=torch.float16, device="hpu")


def test_8_bit_weights_of_elsewhere_on_a_gaudi_2(card: Any, duties: Any, forbidden: Any) -> None:
    """26: beyond 240 are infinities; a Gaudi 3 takes them."""
    weights = torch.tensor([240.0, 448.0]).to(torch.float8_e4m3fn)
    assert weights.to("hpu").float().tolist() == [240, 448]
    card.device_type = "synDeviceGaudi2"
    spoilt = weights.to("hpu").float().tolist()
    assert spoilt[0] == 240
    assert spoilt[1] != spoilt[1], "NaN"
    assert duties.count(26) == 1
    duties.severity = "strict"
    with forbidden("1 numbers beyond 240 ... halve fp8 weights"):
        weights.to("hpu")
    assert (weights.float() / 2).to(torch.float8_e4m3fn).to("hpu").float().tolist() == [120, 224]


def test_memory_is_the_pools(card: Any, forbidden: Any) -> None:
    """32: (limit - in use, limit), and the end of it is the same every time."""
    gc.collect()
    torch.hpu.reset_peak_memory_stats()
    used = torch.hpu.memory_allocated()
    card.free_bytes = used + 8 * MIB
    for _ in range(3):
        x = torch.empty(5 * MIB, dtype=torch.uint8, device="hpu")
        assert torch.hpu.mem_get_info() == (3 * MIB, used + 8 * MIB)
        assert torch.hpu.memory_reserved() == torch.hpu.max_memory_reserved() == used + 8 * MIB
        with forbidden("Allocation failed for size::4194304 (4)MB"):
            torch.empty(4 * MIB, dtype=torch.uint8, device="hpu")
        del x
    assert 0 <= torch.hpu.max_memory_allocated() - (used + 5 * MIB) < 4096, (
        "storages just gone count until they are asked"
    )
    torch.hpu.reset_peak_memory_stats()
    assert torch.hpu.memory_stats()["MaxInUse"] == used


def test_the_first_execution_takes_workspace(card: Any, forbidden: Any) -> None:
    """32: not the compilation."""
    from habana_frameworks.torch.internal.bridge_config import env_setting

    card.workspace_bytes = MIB
    run = torch.compile(lambda x: (x * 2 + 1).relu(), backend="hpu_backend", dynamic=False)
    x = torch.ones(4, device="hpu")
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        run(x)
    gc.collect()
    free = torch.hpu.mem_get_info()[0]
    run(x)
    gc.collect()
    taken = free - torch.hpu.mem_get_info()[0]
    assert taken >= MIB
    run(x)
    gc.collect()
    assert free - torch.hpu.mem_get_info()[0] == taken, "once"
    card.free_bytes = torch.hpu.memory_allocated() + MIB // 2
    with forbidden("Allocation failed ... budget less for the KV cache"):
        torch.compile(lambda x: (x * 3 + 1).relu(), backend="hpu_backend", dynamic=False)(x)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda source: source.to("hpu", non_blocking=True),
    "copy_": lambda source: torch.empty(MIB // 4, device="hpu").copy_(source, non_blocking=True),
}


@pytest.mark.parametrize("name", COPIES)
def test_large_copies_read_their_source_late(name: str, card: Any, duties: Any) -> None:
    """33: a source that is reused before the host has waited."""
    source = torch.zeros(MIB // 4)
    target = COPIES[name](source)
    assert now(target) != [0, 0], "nothing has arrived"
    source.fill_(5)
    assert target.tolist()[:2] == [5, 5], "what was written later"
    source.fill_(0)
    target = COPIES[name](source)
    torch.hpu.synchronize()
    source.fill_(7)
    assert target.tolist()[:2] == [0, 0], "after the host has waited the source is free"
    assert duties.count(33) == 0
    assert card.late_copies == 2
    small = torch.zeros(4)
    copied = small.to("hpu", non_blocking=True)
    small.fill_(1)
    assert copied.tolist() == [0] * 4, "staged at once"


TO_HOST: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda source: source.to("cpu", non_blocking=True),
    "copy_": lambda source: torch.empty(4).copy_(source, non_blocking=True),
}


@pytest.mark.parametrize("name", TO_HOST)
def test_copies_to_the_host_arrive_when_it_waits(name: str, card: Any, duties: Any) -> None:
    """33: be they ever so small; what they read is what stands before them in the stream."""
    source = torch.arange(4.0, device="hpu")
    copy = TO_HOST[name](source)
    reads = card.host_reads
    assert copy.isnan().all(), "nothing has arrived"
    source.add_(7)
    assert copy.isnan().all(), "operators behind the copy do not make the host wait"
    done = torch.hpu.Event()
    done.record()
    done.synchronize()
    assert copy.tolist() == [0, 1, 2, 3]
    assert (card.late_copies, card.host_reads) == (1, reads)
    with duties.without(33):
        assert TO_HOST[name](source).tolist() == [7, 8, 9, 10]
    assert source.to("cpu").tolist() == [7, 8, 9, 10], "a copy that waits"


@pytest.mark.parametrize("severity", ["hostile", "strict"])
def test_a_source_must_stay_until_the_host_waits(severity: str, duties: Any, forbidden: Any) -> None:
    """33: that the card has used the copy does not say that the host may write."""
    duties.severity = severity
    source = torch.zeros(MIB // 4)
    target = source.to("hpu", non_blocking=True)
    assert now(target + 1) == [1, 1], "operators behind the copy see it"
    source.numpy()[:] = 9
    if severity == "strict":
        with forbidden("changed before the host waited ... keep two buffers"):
            torch.hpu.synchronize()
        return
    torch.hpu.synchronize()
    assert target.tolist()[:2] == [9, 9]
    assert duties.count(33) == 1
    with duties.without(33):
        source.to("hpu", non_blocking=True)
        source.fill_(3)
        torch.hpu.synchronize()
    assert duties.count(33) == 1


def side_work(card: Any, seed: int) -> str:
    """Which of two writes, on a side stream and on the main one without a wait between them, is the later one."""
    card.stream_seed = seed
    x = torch.zeros(2, device="hpu")
    with torch.hpu.stream(torch.hpu.Stream()):
        x.fill_(1)
    x.fill_(2)
    torch.hpu.synchronize()
    return {1: "side", 2: "main"}[int(x[0])]


def test_streams_reorder_as_a_seed_says(card: Any) -> None:
    """34"""
    found = [side_work(card, seed) for seed in range(1, 9)]
    assert set(found) == {"side", "main"}
    assert [side_work(card, seed) for seed in [*range(1, 9)]] == found, "the same every time"


@pytest.mark.parametrize("seed", range(1, 7))
def test_waiting_orders_streams(seed: int, card: Any) -> None:
    """34: both ways, and results that nobody has waited for are nothing."""
    card.stream_seed = seed
    main, side = torch.hpu.current_stream(), torch.hpu.Stream()
    x = torch.zeros(2, device="hpu")
    for _ in range(4):
        side.wait_stream(main)
        with torch.hpu.stream(side):
            x.add_(1)
            y = x * 2
            early = now(y)
        main.wait_stream(side)
        x.add_(1)
        assert early == now(y) or early[0] != early[0]
    assert x.tolist() == [8, 8]
    assert y.tolist() == [14, 14]


def test_late_work_is_checked_when_it_is_launched(card: Any, forbidden: Any) -> None:
    for seed in range(1, 4):
        card.stream_seed = seed
        x, index = torch.zeros(2, device="hpu"), torch.tensor([2], device="hpu")
        with torch.hpu.stream(torch.hpu.Stream()), forbidden("index 2 is out of range"):
            x.index_add_(0, index, torch.ones(1, device="hpu"))


def test_one_card_for_a_process(card: Any, forbidden: Any) -> None:
    """35"""
    from habana_frameworks.torch.simulator import device_index

    card.device_count = 4
    with forbidden("hpu:2 is asked for, but this process drives card 0"):
        torch.zeros(2, device="hpu:2")
    torch.hpu.set_device(1)
    try:
        torch.hpu.set_device("hpu:1")
        assert torch.hpu.current_device() == 1
        with forbidden("card 2, but this process drives card 1 ... HABANA_VISIBLE_MODULES"):
            torch.hpu.set_device(2)
        with forbidden("hpu:0 is asked for"):
            torch.zeros(2).to("hpu:0")
        with pytest.raises(ValueError, match="card 7 of 4"):
            torch.hpu.set_device(7)
        with forbidden("fork ... spawn the process"):
            os.fork()
    finally:
        device_index.forget()


def test_tags_of_metrics(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """39: names and order."""
    from habana_frameworks.torch.hpu.metrics import MetricNotFound, metric_global, metric_localcontext

    def tags(name: str) -> list[str]:
        metric = metric_global(name)
        assert metric is not None
        return [tag for tag, _ in metric.stats()]

    assert tags("graph_compilation") == ["TotalNumber", "TotalTime", "AvgTime"]
    assert tags("cpu_fallback") == ["TotalNumber", "FallbackOps"]
    assert tags("memory_defragmentation") == ["TotalNumber", "TotalSuccessful", "AvgTime", "MaxTime"]
    assert metric_global("recipe_cache") is None
    with pytest.raises(MetricNotFound, match="recipe_cache"), metric_localcontext("recipe_cache"):
        pass
    monkeypatch.setenv("PT_HPU_ENABLE_CACHE_METRICS", "1")
    monkeypatch.setenv("PT_HPU_METRICS_GC_DETAILS", "1")
    assert tags("recipe_cache") == ["TotalHit", "RecipeHit", "TotalMiss", "RecipeMiss"]
    with metric_localcontext("graph_compilation") as compiled, metric_localcontext("cpu_fallback") as fallback:
        torch.ones(3, device="hpu") + 1.25
        card.fallbacks["aten.sort"] += 2
    assert compiled.stats()[0] == ("TotalNumber", len(compiled.stats()[3][1]))
    assert compiled.stats()[0][1] >= 1
    assert fallback.stats() == [("TotalNumber", 2), ("FallbackOps", {"aten.sort": 2})]
