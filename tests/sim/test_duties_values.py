"""Duties 14 to 22 and 40: wrong values, forbidden ones, and operators that the card is not known to have."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sim.regions import compiled

Call = Callable[..., Any]


def ones(*size: int, **options: Any) -> Tensor:
    return torch.ones(size, device="hpu", **options)


def write(cache: Tensor, other: Tensor, index: Tensor) -> Tensor:
    cache.index_copy_(0, index, other[:2] + 1)
    return cache.sum()


def stacked() -> tuple[Tensor, Tensor]:
    both = torch.zeros(2, 8, 4, device="hpu")
    return both[0], both[1]


def overlapping() -> tuple[Tensor, Tensor]:
    base = torch.zeros(8, 4, device="hpu")
    return base, base[2:]


def bytes_seen_as_floats() -> tuple[Tensor, Tensor]:
    return torch.zeros(8 * 16, dtype=torch.uint8, device="hpu").view(torch.float32).view(8, 4), ones(8, 4) * 0


ALIASED = {"stacked": stacked, "overlapping": overlapping, "dtype view": bytes_seen_as_floats}


@pytest.mark.parametrize("name", ALIASED)
@pytest.mark.parametrize("inference", [True, False])
def test_writes_to_aliased_inputs(name: str, inference: bool, duties: Any, forbidden: Any) -> None:
    """Duty 14: the region sees its write, the memory does not."""
    with torch.inference_mode(inference):
        index = torch.tensor([1, 3], device="hpu")
        run = compiled(write)
        cache, other = ALIASED[name]()
        assert run(cache, other, index).item() == 8
        assert cache.sum().item() == 0
        assert duties.count(14) == 1
        apart = torch.zeros(8, 4, device="hpu"), torch.zeros(8, 4, device="hpu")
        assert run(*apart, index).item() == 8
        assert apart[0].sum().item() == 8
        duties.severity = "strict"
        with forbidden("aten.copy_.default: a write to ... shares storage ... (duty 14: write to a tensor"):
            run(*ALIASED[name](), index)
        with duties.without(14):
            cache, other = ALIASED[name]()
            run(cache, other, index)
            assert cache.sum().item() == 8


@torch.compiler.disable
def add_one(x: Tensor) -> Tensor:
    return x.add_(1)


def drops(x: Tensor) -> Tensor:
    y = x * 2
    add_one(x)
    return y + 1


def assigns_and_drops(x: Tensor) -> Tensor:
    y = x * 2
    unused = add_one(x)  # noqa: F841
    return y + 1


def consumes(x: Tensor) -> Tensor:
    y = x * 2
    x = add_one(x)
    return y + x


@pytest.mark.parametrize("function", [drops, assigns_and_drops])
def test_disabled_calls_of_which_nothing_is_used(function: Call, duties: Any, forbidden: Any) -> None:
    """Duty 15."""
    x = ones(2)
    assert compiled(function, fullgraph=False)(x).tolist() == [3, 3]
    assert x.tolist() == [1, 1]
    assert duties.count(15) == 1
    duties.severity = "strict"
    with forbidden("add_one: a disabled function ... nothing uses its result (duty 15"):
        compiled(function, fullgraph=False)(x)


def test_disabled_calls_that_count(duties: Any) -> None:
    """Duty 15."""
    x = ones(2)
    assert compiled(consumes, fullgraph=False)(x).tolist() == [4, 4]
    drops(x)
    assert x.tolist() == [3, 3], "outside of a compiled function it is a call like any other"
    assert duties.count(15) == 0


def test_where_of_integers(duties: Any, forbidden: Any) -> None:
    """Duty 16."""
    x = torch.tensor([1, -1, 2], device="hpu")
    choose = lambda x: torch.where(x < 0, x + 7, x)  # noqa: E731
    assert compiled(choose)(x).tolist() == [8, -1, 9], "the wrong way round"
    assert choose(x).tolist() == [1, 6, 2], "right outside of a region"
    assert duties.count(16) == 1
    floats = compiled(lambda x: torch.where(x < 0, x + 7, x))
    assert floats(x.float()).tolist() == [1, 6, 2]
    assert duties.count(16) == 1
    duties.severity = "strict"
    with forbidden("aten.where.self: torch.int64 (3,): integers are miscompiled ... (duty 16"):
        compiled(choose)(x)


INDEXED: dict[str, Call] = {
    "index_select": lambda x, i: x.index_select(0, i),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:1] * 2),
    "index_add": lambda x, i: x.index_add(0, i, x[:1] * 2),
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "scatter": lambda x, i: x.scatter(0, i[:, None], 1.0),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "one_hot": lambda x, i: torch.nn.functional.one_hot(i, 3),
}


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("bad", [-1, 3])
@pytest.mark.parametrize("in_region", [True, False])
def test_indices_out_of_range(name: str, bad: int, in_region: bool, forbidden: Any) -> None:
    """Duty 17."""
    run = compiled(INDEXED[name]) if in_region else INDEXED[name]
    x, last = ones(3, 2), torch.tensor([2], device="hpu")
    assert torch.equal(run(x, last).cpu(), INDEXED[name](x.cpu(), last.cpu()))
    with forbidden(f"{name} ... index {bad} is out of range, expected 0 to 2 (duty 17"):
        run(x, torch.tensor([bad], device="hpu"))


@pytest.mark.parametrize("in_region", [True, False])
def test_minus_one_as_a_pad(in_region: bool, duties: Any, forbidden: Any) -> None:
    """Duty 17: as vllm-gaudi relies on it, only where that is asked for."""
    duties.minus_one = True
    x, index = ones(3, 2), torch.tensor([-1, 1], device="hpu")
    wrap = compiled if in_region else lambda call: call
    assert wrap(INDEXED["index_select"])(x, index).tolist() == [[0, 0], [1, 1]]
    assert wrap(lambda x, i: x.index_copy(0, i, x[:2] * 2))(x, index).tolist() == [[1, 1], [2, 2], [1, 1]]
    assert wrap(INDEXED["one_hot"])(x, index).tolist() == [[0, 0, 0], [0, 1, 0]]
    with forbidden("gather ... index -1 is out of range"):
        wrap(INDEXED["gather"])(x, index)


@pytest.mark.parametrize("in_region", [True, False])
def test_rows_written_twice(in_region: bool, duties: Any, forbidden: Any) -> None:
    """Duty 18."""
    call = lambda cache, index, x: cache.index_copy_(0, index, x) + 0  # noqa: E731
    run = compiled(call) if in_region else call
    cache, x = torch.zeros(8, 2, device="hpu"), ones(3, 2)
    for pads in ([0, 0, 4], [7, 2, 7]):
        run(cache, torch.tensor(pads, device="hpu"), x)
    with forbidden("index_copy ... index 4 is written twice, of 8 rows ... (duty 18"):
        run(cache, torch.tensor([4, 1, 4], device="hpu"), x)
    duties.pad_rows = 4
    run(cache, torch.tensor([4, 1, 4], device="hpu"), x)


@pytest.mark.parametrize("in_region", [True, False])
def test_index_reduce(in_region: bool, card: Any, duties: Any) -> None:
    """Duty 19."""

    def run(reduce: str) -> Tensor:
        call = lambda x, i, y: x.index_reduce_(0, i, y, reduce, include_self=True) + 0  # noqa: E731
        return (compiled(call) if in_region else call)(ones(2, 2), torch.tensor([1], device="hpu"), ones(1, 2) * 3)

    assert run("amax").tolist() == [[1, 1], [3, 3]]
    assert (duties.count(19), sum(card.fallbacks.values())) == (0, 0)
    assert run("prod").tolist() == [[1, 1], [3, 3]]
    assert (duties.count(19), sum(card.fallbacks.values())) == (1, 1)


@pytest.mark.parametrize("in_region", [True, False])
def test_stable_sorts(in_region: bool, card: Any, duties: Any) -> None:
    """Duty 20."""

    def run(size: int, dim: int, stable: bool) -> Tensor:
        call = lambda x: torch.sort(x, stable=stable, dim=dim).values + 0  # noqa: E731
        return (compiled(call) if in_region else call)(torch.rand(2, size).to("hpu"))

    run(37, 1, True)
    run(100, 1, False)
    run(100, 0, False)
    assert duties.count(20) == 0
    run(38, 1, True)
    run(3, 0, True)
    assert duties.count(20) == sum(card.fallbacks.values()) == 2


HOST_READS: dict[str, Call] = {
    "item": lambda x: x.sum().item() + x,
    "tolist": lambda x: sum(x.tolist()) + x,
    "bool": lambda x: x + 1 if x.sum() > 0 else x,
    "cpu": lambda x: x.cpu().to("hpu") + x,
    "to": lambda x: x.to("cpu").to("hpu") + x,
}


@pytest.mark.parametrize("name", HOST_READS)
def test_host_reads(name: str, card: Any, duties: Any, forbidden: Any) -> None:
    """Duty 21: inside of a compiled function, be it a graph or between two; outside it waits."""
    x = ones(3)
    reads, card.host_read_us = card.host_reads, 1000
    HOST_READS[name](x)
    assert card.host_reads == reads + 1
    with forbidden("a host read ... (duty 21"):
        compiled(HOST_READS[name], fullgraph=False)(x)


def test_host_reads_of_a_disabled_function(card: Any) -> None:
    """Duty 21: it is outside of the region, and counted."""
    read = torch.compiler.disable(lambda x: x.sum().item())
    assert compiled(lambda x: x * read(x + 1), fullgraph=False)(ones(3)).tolist() == [6, 6, 6]
    assert card.host_reads >= 1


def test_host_reads_take_time(card: Any) -> None:
    """Duty 21: at least as long as is asked for."""
    card.host_read_us = 20_000
    begin = time.perf_counter()
    ones(3).tolist()
    assert time.perf_counter() - begin >= 0.02


def forward(x: Tensor, cache: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    cache.index_copy_(0, index, x)
    return cache.sum(0), index + 1


def test_compile_only(ht: Any, card: Any, duties: Any, compilations: Any, forbidden: Any) -> None:
    """Duty 22: recipes are compiled, and nothing that comes out of it is of use."""
    from habana_frameworks.torch.internal.bridge_config import env_setting
    from habana_frameworks.torch.simulator import garbage

    run = compiled(forward)
    x, cache, index = ones(2, 4), torch.zeros(8, 4, device="hpu"), torch.tensor([1, 3], device="hpu")
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        assert compilations(lambda: run(x, cache, index)) == 1
        summed, moved = run(x, cache, index)
        assert (summed.shape, moved.shape, summed.device.type) == ((4,), (2,), "hpu")
        for wrong in (summed, moved, cache):
            with forbidden("the host reads ... which a compile-only warm-up did not compute (duty 22"):
                wrong.cpu()
    with forbidden("duty 22"):
        summed.tolist()
    assert x.tolist() == [[1] * 4] * 2
    assert compilations(lambda: run(x, cache, index)) == 0
    assert duties.count(22) == 1, "a region reads what the warm-up left"
    assert any(found.bytes == cache.nbytes for found in garbage.find())
    cache.zero_()
    del summed, moved
    assert garbage.find() == [], "after it is filled again"
    assert run(x, cache, index)[0].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_only_unlike_the_tracing(dynamic: bool, card: Any, compilations: Any) -> None:
    """Duty 22: one graph, whose recipes are those of its inputs: of another storage offset, and of other sizes."""
    from habana_frameworks.torch.internal.bridge_config import env_setting

    run = compiled(lambda x: x * 2, dynamic=dynamic, force_static_compile=not dynamic)
    whole = ones(7, 4)
    first, later = whole[:3], whole[:5] if dynamic else whole[4:]
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        run(first)
        graphs = card.compiled_graphs
        assert compilations(lambda: run(later)) == 1
        assert run(later).shape == later.shape
    assert card.compiled_graphs == graphs
    assert compilations(lambda: run(later)) == 0
    assert run(later).tolist() == [[2] * 4] * len(later)


def test_compile_only_outside_of_regions(forbidden: Any) -> None:
    """Duty 22: single operators do not run either; copies from the host do."""
    from habana_frameworks.torch.internal.bridge_config import env_setting

    host = torch.arange(3)
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        x = host.to("hpu")
        y = x + 1
        assert x.tolist() == [0, 1, 2]
        with forbidden("the host reads torch.int64 (3,) ... (duty 22"):
            y.tolist()
    with forbidden("index 6123456789012345678 is out of range"):
        x.index_select(0, y)


def test_unknown_operators(duties: Any, forbidden: Any) -> None:
    """Duty 40."""
    x = torch.eye(2).to("hpu")
    with forbidden("aten.heaviside.default: not known on Gaudi (duty 40: ... add aten::heaviside to operators.txt"):
        torch.heaviside(x, x)
    with forbidden("aten.heaviside.default: not known on Gaudi"):
        compiled(lambda x: torch.heaviside(x, x) + 1)(x)
    with duties.without(40):
        assert torch.heaviside(x, x).tolist() == [[1, 0], [0, 1]]


def test_the_list_of_operators() -> None:
    """Duty 40: sorted, without repetition, and without operators of data-dependent size in regions alone."""
    from habana_frameworks.torch.simulator.operators import LIST, read_list

    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == sorted(set(lines))
    known = read_list()
    assert {"aten::index_copy", "aten::index_select", "aten::mm", "aten::topk", "aten::sort"} <= known
    for name in known:
        namespace, operator = name.split("::")
        assert namespace in ("hpu", "c10d", "_c10d_functional") or hasattr(getattr(torch.ops, namespace), operator), (
            name
        )


@pytest.mark.parametrize(("name", "value"), [("SIM_HPU_SEVERITY", "mild"), ("SIM_HPU_DUTIES_OFF", "14;16")])
def test_switches_of_the_environment(name: str, value: str, duties: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: found '{value}', expected"):
        duties.reset()
    monkeypatch.setenv("SIM_HPU_SEVERITY", "strict")
    monkeypatch.setenv("SIM_HPU_DUTIES_OFF", "14, 16")
    duties.reset()
    assert (duties.severity, duties.on(14), duties.on(16), duties.on(15)) == ("strict", False, False, True)
