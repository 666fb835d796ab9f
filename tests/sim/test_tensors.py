"""Tensors of device "hpu": where they are made, what they say of themselves, and the way between host and card."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

HPU = torch.device("hpu", 0)


@pytest.mark.parametrize("device", ["hpu", "hpu:0", torch.device("hpu")])
def test_factories(device: Any) -> None:
    made = [
        torch.empty(2, device=device),
        torch.tensor([1, 2], device=device),
        torch.arange(3, device=device),
        torch.as_tensor([1.0], device=device),
        torch.zeros_like(torch.ones(2), device=device),
        torch.ones(2).new_zeros(3, device=device),
        torch.rand(2, device=device, generator=torch.Generator(device=device).manual_seed(1)),
        torch.full((2,), 3.0, device=device, pin_memory=False),
    ]
    assert [tensor.device for tensor in made] == [HPU] * len(made)
    assert not any(tensor.is_cpu for tensor in made)
    assert {tensor.get_device() for tensor in made} == {0}


def test_results_and_views_are_on_the_card() -> None:
    x = torch.ones(2, 3, device="hpu")
    for tensor in (x + 1, x[0], x.t(), x.new_empty(4), torch.empty_like(x), x.sum(), *x.split(1), torch.cat([x, x])):
        assert tensor.device == HPU
    assert torch.ones(2).device == torch.device("cpu")
    assert torch.zeros_like(x, device="cpu").device == torch.device("cpu")


def test_copies_between_host_and_card_share_nothing() -> None:
    host = torch.zeros(3)
    card = host.to("hpu")
    assert card.device == HPU
    host += 1
    assert card.tolist() == [0, 0, 0]
    back = card.cpu()
    assert back.device == torch.device("cpu")
    card += 5
    assert back.tolist() == [0, 0, 0]
    assert card.to("hpu") is card
    assert card.to(torch.float64).device == HPU
    assert host.to(card).device == HPU
    assert host.to(device="hpu", dtype=torch.int32, non_blocking=True).dtype == torch.int32
    assert card.to("cpu", torch.float64).dtype == torch.float64
    card.copy_(host)
    assert card.tolist() == [1, 1, 1]
    assert torch.as_tensor(host, device="hpu").device == HPU
    assert host.device == torch.device("cpu")


def test_default_device_context() -> None:
    """vLLM's loader builds models like this."""
    with torch.device("hpu"):
        layer = torch.nn.Linear(2, 3)
        made = torch.zeros(2)
        data = torch.tensor([1])
        here = torch.ones(2, device="cpu")
    assert {layer.weight.device, made.device, data.device} == {HPU}
    assert here.device == torch.ones(2).device == torch.device("cpu")
    assert copy.deepcopy(layer).weight.device == HPU
    assert copy.deepcopy(made).device == HPU


def test_modules_move() -> None:
    layer = torch.nn.Linear(2, 3)
    assert layer.to("hpu").weight.device == HPU
    assert layer(torch.ones(1, 2, device="hpu")).device == HPU
    assert layer.to("cpu").weight.device == torch.device("cpu")


def test_threads_see_the_card() -> None:
    found: list[torch.device] = []

    class Worker(threading.Thread):
        def run(self) -> None:
            found.append(torch.ones(2, device="hpu").device)

    thread = Worker()
    thread.start()
    thread.join()
    assert found == [HPU]


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.nn.functional.linear(torch.ones(2, 3, device="hpu"), torch.ones(4, 3, device="hpu"))
        assert x.device == HPU
        assert x.tolist() == [[3.0] * 4] * 2


def test_generators() -> None:
    generator = torch.Generator(device="hpu")
    assert generator.device == HPU
    assert torch.Generator().device == torch.device("cpu")
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    generator.manual_seed(3)
    first = torch.empty(4, device="hpu").exponential_(generator=generator)
    generator.manual_seed(3)
    assert torch.equal(first, torch.empty(4, device="hpu").exponential_(generator=generator))


def test_tensors_of_two_devices(forbidden: Any) -> None:
    x, host = torch.ones(3, device="hpu"), torch.ones(3)
    with forbidden("aten.add.Tensor: a tensor of shape (3,) is on the host"):
        x + host
    with forbidden("aten.index_select ... on the host"):
        x.index_select(0, torch.tensor([0]))
    assert (x * torch.tensor(2.0)).tolist() == [2, 2, 2], "a number of the host is no tensor of another device"
    assert x[torch.tensor([1, 2])].tolist() == [1, 1], "torch moves an index by itself"


def test_numpy_and_text(forbidden: Any) -> None:
    x = torch.ones(2, device="hpu")
    with forbidden("numpy: the tensor is on the card"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1, 1]
    assert "1." in repr(x)
    assert f"{x.sum()}"


def test_storages_are_forgotten() -> None:
    """A host tensor at the address of one that was on the card is not on the card."""
    for size in range(5000):
        torch.empty(size % 7 + 1, device="hpu")
        assert torch.empty(size % 7 + 1).device.type == "cpu"
