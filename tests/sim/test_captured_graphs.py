"""`wrap_in_hpu_graph`: which inputs share a graph, and what a replay does and does not do. covers: B9"""

from __future__ import annotations

import gc
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

PT_HPU_LAZY_MODE = "1"

MIB = 1 << 20
Parts = namedtuple("Parts", ["lo", "hi"])


class Other(NamedTuple):
    lo: Tensor
    hi: Tensor


@dataclass
class Plain:
    lo: Tensor


@dataclass(frozen=True, eq=False)
class Frozen:
    lo: Tensor


def ones(*size: int, **options: Any) -> Tensor:
    return torch.ones(size, device="hpu", **options)


def first(value: Any) -> Tensor:
    """Of whatever contains a tensor, that tensor times two."""
    while not isinstance(value, Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value * 2


SAME: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tensor": lambda: (ones(2), ones(2) * 7),
    "view": lambda: (ones(4)[1:], ones(4)[1:]),
    "tuple": lambda: ((ones(2), 1), (ones(2), 1)),
    "list": lambda: ([ones(2)], [ones(2)]),
    "dict": lambda: ({"a": ones(2)}, {"a": ones(2)}),
    "named tuple": lambda: (Parts(ones(2), ones(3)), Parts(ones(2), ones(3))),
    "nested": lambda: ((Parts([ones(2)], None), "x"), (Parts([ones(2)], None), "x")),
}
DIFFERENT: dict[str, Callable[[], tuple[Any, Any]]] = {
    "shape": lambda: (ones(2), ones(3)),
    "dtype": lambda: (ones(2), ones(2, dtype=torch.float64)),
    "stride": lambda: (ones(2, 2), ones(2, 2).t()),
    "offset": lambda: (ones(4)[:2], ones(4)[1:3]),
    "scalar": lambda: ((ones(2), 1), (ones(2), 2)),
    "type of scalar": lambda: ((ones(2), 1), (ones(2), 1.0)),
    "bool or int": lambda: ((ones(2), 1), (ones(2), True)),
    "key": lambda: ({"a": ones(2)}, {"b": ones(2)}),
    "length": lambda: ([ones(2)], [ones(2), ones(2)]),
    "None": lambda: ((ones(2), None), (ones(2), 0)),
    "aliases": lambda: ((x := ones(2), x), (ones(2), ones(2))),
    "named tuples of two types": lambda: (Parts(ones(2), ones(2)), Other(ones(2), ones(2))),
}


@pytest.mark.parametrize("name", SAME)
def test_same_graph(name: str, ht: Any, card: Any) -> None:
    run = ht.hpu.wrap_in_hpu_graph(first)
    for value in SAME[name]():
        expected = first(value).tolist()
        assert run(value).tolist() == expected
    assert (card.captures, card.replays) == (1, 1)


@pytest.mark.parametrize("name", DIFFERENT)
def test_graph_of_its_own(name: str, ht: Any, card: Any) -> None:
    run = ht.hpu.wrap_in_hpu_graph(first)
    for value in DIFFERENT[name]():
        run(value)
    assert (card.captures, card.replays) == (2, 0)


def test_dataclasses(ht: Any, forbidden: Any) -> None:
    run = ht.hpu.wrap_in_hpu_graph(lambda parts: parts.lo * 2)
    with pytest.raises(TypeError, match="unhashable"):
        run(Plain(ones(2)))
    with forbidden("Frozen holds tensors that a replay would not see"):
        run(Frozen(ones(2)))


def test_tensors_of_the_host_are_no_inputs(ht: Any, forbidden: Any) -> None:
    with forbidden("an input of shape (2,) is on the host"):
        ht.hpu.wrap_in_hpu_graph(first)(torch.ones(2))


def test_replay_runs_no_python(ht: Any) -> None:
    """What a graph reads besides its inputs is what it read when it was captured."""
    calls = []
    weight = ones(2)
    number = {"factor": 2}

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        return x * number["factor"] + weight

    run = ht.hpu.wrap_in_hpu_graph(forward)
    assert run(ones(2)).tolist() == [3, 3]
    number["factor"] = 100
    weight.fill_(5)
    assert run(ones(2) * 2).tolist() == [9, 9], "captured factor, present contents of the weight"
    assert len(calls) == 1


def test_replay_overwrites_the_last_result(ht: Any) -> None:
    run = ht.hpu.wrap_in_hpu_graph(lambda x: (x + 1, {"y": x * 2}))
    before = run(ones(2))
    assert before[0].tolist() == [2, 2]
    after = run(ones(2) * 5)
    assert after[0] is before[0]
    assert before[0].tolist() == [6, 6]
    assert before[1]["y"].tolist() == [10, 10]


@pytest.mark.parametrize("disable_tensor_cache", [False, True])
def test_inputs_of_a_graph(disable_tensor_cache: bool, ht: Any) -> None:
    """With the tensor cache the inputs of the capture are the graph's own: a replay copies into them."""
    run = ht.hpu.wrap_in_hpu_graph(lambda x: x * 2, disable_tensor_cache=disable_tensor_cache)
    captured, later = ones(2), ones(2) * 4
    run(captured)
    assert run(later).tolist() == [8, 8]
    assert captured.tolist() == ([1, 1] if disable_tensor_cache else [4, 4])


@pytest.mark.parametrize("disable_tensor_cache", [False, True])
def test_writes_are_seen(disable_tensor_cache: bool, ht: Any) -> None:
    """A KV cache outside, written through a view and read in the same graph."""
    cache = torch.zeros(3, 2, device="hpu")

    def forward(tokens: Tensor, slots: Tensor) -> Tensor:
        cache.view(6).index_copy_(0, slots, tokens)
        return cache.sum(1)

    run = ht.hpu.wrap_in_hpu_graph(forward, disable_tensor_cache=disable_tensor_cache)
    assert run(ones(1), torch.tensor([0], device="hpu")).tolist() == [1, 0, 0]
    assert run(ones(1) * 3, torch.tensor([5], device="hpu")).tolist() == [1, 0, 3]
    assert cache.tolist() == [[1, 0], [0, 0], [0, 3]]


def test_modules(ht: Any, card: Any) -> None:
    layer = ht.hpu.wrap_in_hpu_graph(torch.nn.Linear(2, 3).to("hpu"))
    with torch.inference_mode():
        found = [layer(ones(1, 2) * scale).tolist() for scale in (1, 2)]
        expected = [torch.nn.functional.linear(ones(1, 2) * k, layer.weight, layer.bias).tolist() for k in (1, 2)]
    assert found == expected
    assert (card.captures, card.replays) == (1, 1)
    layer.clear_cache()
    layer(ones(1, 2))
    assert card.captures == 2


def test_bypass(ht: Any, card: Any) -> None:
    run = ht.hpu.wrap_in_hpu_graph(first)
    assert run(ones(2), bypass_hpu_graphs=True, warmup_mode=True).tolist() == [2, 2]
    assert (card.captures, card.bypasses) == (0, 1)
    run(ones(2), bypass_hpu_graphs=False, warmup_mode=True)
    run(ones(2), warmup_mode=False)
    assert (card.captures, card.replays) == (1, 1)


def test_max_graphs(ht: Any, card: Any) -> None:
    run = ht.hpu.wrap_in_hpu_graph(first, max_graphs=2)
    for size in (1, 2, 3, 3, 1):
        assert run(ones(size)).tolist() == [2] * size
    assert (card.captures, card.replays, card.bypasses) == (2, 1, 2)


def test_memory_of_graphs(ht: Any, card: Any, forbidden: Any) -> None:
    """A graph takes memory of its own once, and gives it back when it goes."""
    gc.collect()
    free = ht.hpu.mem_get_info()[0]
    card.free_bytes, card.bytes_per_capture = card.free_bytes - free + 25 * MIB, 10 * MIB
    run = ht.hpu.wrap_in_hpu_graph(first)
    run(ones(1))
    run(ones(1))
    assert 14 * MIB < ht.hpu.mem_get_info()[0] < 15 * MIB
    run(ones(2))
    with forbidden(f"out of memory: a graph takes {10 * MIB} bytes, ... are free"):
        run(ones(3))
    del run
    gc.collect()
    assert 24 * MIB < ht.hpu.mem_get_info()[0] <= 25 * MIB


def test_no_graph_inside_a_graph(ht: Any, forbidden: Any) -> None:
    inner = ht.hpu.wrap_in_hpu_graph(first)
    inner(ones(2))
    with forbidden("a replay inside a region"):
        ht.hpu.wrap_in_hpu_graph(lambda x: inner(x + 1))(ones(2))


OPERATIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x.add_(y),
    lambda x, y: x.t(),
    lambda x, y: x.reshape(-1).view(3, 3),
    lambda x, y: x[1:].sum(0).expand(3, 3),
    lambda x, y: torch.cat([x[:1], y[1:]]),
    lambda x, y: x.index_select(0, 2 - torch.arange(3, device=x.device)),
    lambda x, y: x.mul_(2).clone(),
    lambda x, y: x[0].fill_(3).expand(3, 3) * y,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.einsum("ij,jk->ik", x, y),
    lambda x, y: x.softmax(-1),
    lambda x, y: x.t().copy_(y),
]


@settings(max_examples=30, deadline=None)
@given(
    program=st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 3), st.integers(0, 3)), max_size=8)
)
def test_replay_equals_a_run_without_graph(program: list[tuple[int, int, int]]) -> None:
    """Any program of views, writes and products on two inputs and a buffer outside."""
    import habana_frameworks.torch as ht

    def forward(x: Tensor, y: Tensor, buffer: Tensor) -> Tensor:
        values = [x, y, buffer]
        for operation, one, other in program:
            try:
                values.append(OPERATIONS[operation](values[one % len(values)], values[-1 - other % len(values)]))
            except RuntimeError as error:
                if "single memory location" not in str(error) and "view size" not in str(error):
                    raise
        return torch.stack([*values, buffer]).sum(0)

    buffers = torch.full((3, 3), 0.5, device="hpu"), torch.full((3, 3), 0.5, device="hpu")
    run = ht.hpu.wrap_in_hpu_graph(lambda x, y: forward(x, y, buffers[0]))
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.rand(3, 3, device="hpu"), torch.rand(3, 3, device="hpu")
        expected = forward(x.clone(), y.clone(), buffers[1])
        assert torch.equal(run(x, y), expected)
        assert torch.equal(*buffers)
