"""What the card forbids: each forbidden thing raises, and what stands beside it works. covers: A10"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

PT_HPU_LAZY_MODE = "1"

Call = Callable[[Tensor], object]

HOST_READS: dict[str, Call] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "int": lambda x: int(x.sum()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "copy_ to the host": lambda x: torch.empty(3).copy_(x),
    "repr": repr,
}
DYNAMIC: dict[str, Call] = {
    "nonzero": lambda x: x.nonzero(),
    "argwhere": torch.argwhere,
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "unique_consecutive": torch.unique_consecutive,
    "mask": lambda x: x[x > 0],
    "mask write": lambda x: x.index_put_((x > 0,), x.new_zeros(())),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
}
STATIC: dict[str, Call] = {
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "topk": lambda x: x.topk(2).values,
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones_like(x).long(), output_size=3),
    "index": lambda x: x[torch.zeros_like(x).long()],
    "number": lambda x: x + torch.tensor(2.0),
}


@pytest.mark.parametrize("name", HOST_READS)
@pytest.mark.parametrize("inference", [True, False])
def test_host_reads(name: str, inference: bool, ht: Any, card: Any, forbidden: Any) -> None:
    call = HOST_READS[name]
    with torch.inference_mode(inference):
        x = torch.ones(3, device="hpu")
        call(x)
        assert card.host_reads > 0, "allowed outside of a captured region, but the host waits"
        with forbidden("a host read inside a region captured by wrap_in_hpu_graph"):
            ht.hpu.wrap_in_hpu_graph(lambda x: call(x + 0))(x)


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("inference", [True, False])
def test_shapes_that_depend_on_data(name: str, inference: bool, ht: Any, card: Any, forbidden: Any) -> None:
    call = DYNAMIC[name]
    with torch.inference_mode(inference):
        x = torch.ones(3, device="hpu")
        call(x)
        assert card.host_reads > 0
        with forbidden("inside a region captured by wrap_in_hpu_graph"):
            ht.hpu.wrap_in_hpu_graph(lambda x: call(x + 0))(x)


@pytest.mark.parametrize("name", STATIC)
def test_static_shapes_are_captured(name: str, ht: Any, card: Any) -> None:
    x = torch.arange(3.0, device="hpu")
    expected = STATIC[name](x)
    reads = card.host_reads
    found = ht.hpu.wrap_in_hpu_graph(STATIC[name])(x)
    assert card.host_reads == reads
    assert isinstance(expected, Tensor)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "call", [lambda x: x + torch.tensor([1.0], device="hpu"), lambda x: x.copy_(torch.ones(3)), lambda x: x + x.cpu()]
)
def test_copies_inside_a_captured_region(call: Call, ht: Any, forbidden: Any) -> None:
    with forbidden("inside a region captured by wrap_in_hpu_graph"):
        ht.hpu.wrap_in_hpu_graph(call)(torch.ones(3, device="hpu"))


def set_item(x: Tensor, index: Any, value: object) -> Tensor:
    y = x + 0
    y[index] = value
    return y


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("value", [2.0, True])
def test_one_element_cannot_be_set_to_a_number_of_the_host(
    value: Any, inference: bool, ht: Any, forbidden: Any
) -> None:
    """As in CUDA graphs: torch copies the number to the element's place."""
    with torch.inference_mode(inference):
        x = torch.ones(3, device="hpu")
        assert set_item(x, 1, value).tolist() == [1, float(value), 1]
        with forbidden("a copy from the host inside a region captured by wrap_in_hpu_graph"):
            ht.hpu.wrap_in_hpu_graph(lambda x: set_item(x, 1, value))(x)
        with forbidden("a copy from the host inside a region captured by wrap_in_hpu_graph"):
            ht.hpu.wrap_in_hpu_graph(lambda x: (x + 0).copy_(torch.tensor(2.0)))(x)


@pytest.mark.parametrize("index", [slice(0, 2), slice(1, 2), ...])
def test_many_elements_may_be_set_to_a_number_of_the_host(index: Any, ht: Any) -> None:
    x = torch.ones(3, device="hpu")
    captured = ht.hpu.wrap_in_hpu_graph(lambda x: set_item(x, index, 2.0))
    assert captured(x).tolist() == captured(x).tolist() == set_item(x, index, 2.0).tolist()
    own = ht.hpu.wrap_in_hpu_graph(lambda x: set_item(x, 1, x[2] * 3))
    assert own(x).tolist() == [1, 3, 1], "a number of the card is no copy"


@pytest.mark.parametrize("bad", [-1, 3])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.index_copy_(0, i, x[:1] * 2),
        lambda x, i: x.index_copy(0, i, x[:1] * 2),
        lambda x, i: x.index_add_(0, i, x[:1] * 2),
        lambda x, i: x.index_fill_(0, i, 0.0),
        lambda x, i: x.index_reduce_(0, i, x[:1] * 2, "amax", include_self=True),
        lambda x, i: x.gather(0, i[:, None]),
        lambda x, i: x.scatter_(0, i[:, None], 1.0),
        lambda x, i: x.scatter(0, i[:, None], x[:1] * 2),
        lambda x, i: x.scatter_add_(0, i[:, None], x[:1] * 2),
        lambda x, i: x.scatter_reduce_(0, i[:, None], x[:1] * 2, "amax"),
        lambda x, i: torch.nn.functional.embedding(i, x),
        lambda x, i: x[i],
        lambda x, i: x[:, 0][i],
        lambda x, i: x.index_put_((i,), x[:1] * 2),
        lambda x, i: x.__setitem__(i, 0.0),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_index_out_of_range(call: Any, bad: int, captured: bool, ht: Any, forbidden: Any) -> None:
    """The last one of three rows, not row -1 or row 3."""
    run = ht.hpu.wrap_in_hpu_graph(call) if captured else call
    with torch.inference_mode():
        run(torch.ones(3, 2, device="hpu"), torch.tensor([2], device="hpu"))
        with forbidden("is out of range, expected 0 to"):
            run(torch.ones(3, 2, device="hpu"), torch.tensor([bad], device="hpu"))
            # a replay runs late
            ht.hpu.synchronize()


def test_index_of_the_second_dimension(forbidden: Any) -> None:
    x = torch.ones(2, 5, device="hpu")
    index = torch.tensor([4], device="hpu")
    assert x[:, index].shape == (2, 1)
    with forbidden("aten.index.Tensor: index 5 is out of range, expected 0 to 4"):
        x[:, index + 1]
    with forbidden("index 4 is out of range, expected 0 to 1"):
        x[index, index]


def test_host_tensors_are_not_the_cards_business() -> None:
    assert torch.arange(3)[torch.tensor([-1])].tolist() == [2]
    assert torch.arange(3).nonzero().shape == (2, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"reduce": "amin"},
        {"reduce": "mean"},
        {"dim": 1},
        {"include_self": False},
    ],
)
def test_index_reduce_exists_in_one_form(options: dict[str, Any], card: Any, duties: Any) -> None:
    """Duty 19: every other form runs on the CPU."""
    x = torch.ones(2, 2, device="hpu")
    index = torch.tensor([0, 1], device="hpu")
    x.index_reduce_(0, index, x * 2, "amax", include_self=True)
    assert x.tolist() == [[2, 2], [2, 2]]
    assert not card.fallbacks
    chosen = {"dim": 0, "reduce": "amax", "include_self": True, **options}
    x.index_reduce_(chosen["dim"], index, x * 2, chosen["reduce"], include_self=chosen["include_self"])
    assert card.fallbacks == {"aten::index_reduce_": 1}
    assert duties.count(19) == 1


def test_the_error_names_operator_and_finding(forbidden: Any) -> None:
    with forbidden("index -1") as caught:
        torch.ones(2, device="hpu").index_select(0, torch.tensor([-1], device="hpu"))
    assert caught.value.operator == "aten.index_select.default"
    assert caught.value.finding == "index -1 is out of range, expected 0 to 1"


def test_an_error_leaves_the_region(ht: Any, card: Any, forbidden: Any) -> None:
    run = ht.hpu.wrap_in_hpu_graph(lambda x, read: x.tolist() if read else x + 1)
    x = torch.ones(2, device="hpu")
    with forbidden("tolist"):
        run(x, True)
    assert card.captures == 0
    assert x.tolist() == [1, 1]
    assert run(x, False).tolist() == [2, 2]
