"""The card computes late: a replay runs when something waits for it, and other streams do not. covers: F6"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

PT_HPU_LAZY_MODE = "1"


def adder(ht: Any) -> tuple[Tensor, Callable[[], None]]:
    """A tensor, and the launch of a graph that adds one to it."""
    x = torch.zeros(2, device="hpu")
    run = ht.hpu.wrap_in_hpu_graph(lambda y: y.add_(1), disable_tensor_cache=True)
    run(x)
    return x, lambda: run(x)


def now(x: Tensor) -> float:
    """What the card's memory holds at this moment; looks past the card's operators, and waits for nothing."""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        return float(x[0])


WAITS: dict[str, Callable[[Any, Tensor], object]] = {
    "card": lambda ht, x: ht.hpu.synchronize(),
    "stream": lambda ht, x: ht.hpu.current_stream().synchronize(),
    "event": lambda ht, x: ht.hpu.current_stream().record_event().synchronize(),
    "host read": lambda ht, x: x.tolist(),
    "other host read": lambda ht, x: x.sum().item(),
    "copy to the host": lambda ht, x: x.to("cpu", torch.float64),
    "operator": lambda ht, x: x + 1,
    "write": lambda ht, x: torch.zeros(1, device="hpu").copy_(torch.ones(1)),
    "capture": lambda ht, x: ht.hpu.wrap_in_hpu_graph(lambda y: y * 2)(torch.ones(1, device="hpu")),
    "another stream that waits": lambda ht, x: ht.hpu.Stream().wait_stream(ht.hpu.current_stream()),
    "another stream that waits for an event": lambda ht, x: ht.hpu.Stream().wait_event(
        ht.hpu.current_stream().record_event()
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_replay_runs_when_something_waits_for_it(name: str, ht: Any, card: Any) -> None:
    x, launch = adder(ht)
    launch()
    launch()
    assert (card.replays, now(x)) == (2, 1)
    WAITS[name](ht, x)
    assert now(x) == 3


def test_other_streams_do_not_wait(ht: Any) -> None:
    x, launch = adder(ht)
    launch()

    def write() -> None:
        with ht.hpu.stream(ht.hpu.Stream()):
            x.fill_(5)
            torch.ones(3, device="hpu").tolist()
            ht.hpu.current_stream().synchronize()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert now(x) == 5
    ht.hpu.synchronize()
    assert now(x) == 6, "what was launched before has run after"


def test_an_event_is_one_moment(ht: Any) -> None:
    x, launch = adder(ht)
    launch()
    event = ht.hpu.Event()
    event.record()
    launch()
    assert not event.query()
    assert event.query()
    assert now(x) == 2
    ht.hpu.Event().wait()
    assert now(x) == 2
    with ht.hpu.stream(ht.hpu.Stream()):
        launch()
        ht.hpu.current_stream().synchronize()
        assert ht.hpu.current_stream().query()
    assert now(x) == 3


def test_a_replay_reads_its_inputs_when_it_runs(ht: Any) -> None:
    x, launch = adder(ht)
    launch()
    with ht.hpu.stream(ht.hpu.Stream()):
        x.fill_(10)
        ht.hpu.current_stream().synchronize()
    assert x.tolist() == [11, 11]


def test_threads_have_a_current_stream_each(ht: Any) -> None:
    seen = []
    with ht.hpu.stream(ht.hpu.Stream()):
        thread = threading.Thread(target=lambda: seen.append(ht.hpu.current_stream()))
        thread.start()
        thread.join()
    assert seen == [ht.hpu.default_stream()]


def test_an_error_is_raised_where_somebody_waits_once(ht: Any, forbidden: Any) -> None:
    run = ht.hpu.wrap_in_hpu_graph(lambda y, i: y.index_select(0, i))
    x, index = torch.ones(3, 2, device="hpu"), torch.tensor([2], device="hpu")
    run(x, index)
    found = run(x, index + 1)
    with forbidden("index 3 is out of range"):
        found.tolist()
    assert found.tolist() == [[1, 1]]
