"""The circuit breaker's three states."""

from __future__ import annotations

from vllm_gaudi_ucm.store.guarded import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_failures_in_a_row_open_it() -> None:
    breaker = Breaker(2, 5.0, Clock())
    for _ in range(3):
        assert breaker.allow()
        assert not breaker.failed()
        assert breaker.allow()
        breaker.succeeded()
    assert breaker.state == "closed"
    assert not breaker.failed()
    assert breaker.failed()
    assert breaker.state == "open"
    assert not breaker.allow()


def test_one_call_tries_at_a_time() -> None:
    clock = Clock()
    breaker = Breaker(1, 5.0, clock)
    assert breaker.failed()
    clock.now = 4.9
    assert not breaker.allow()
    clock.now = 5.0
    assert breaker.state == "half_open"
    assert breaker.allow()
    assert not breaker.allow()
    assert not breaker.failed()  # it was open before
    assert breaker.state == "open"
    clock.now = 9.9
    assert not breaker.allow()
    clock.now = 10.0
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.state == "closed"
    assert all(breaker.allow() for _ in range(5))


def test_it_needs_as_many_failures_again_after_it_closed() -> None:
    clock = Clock()
    breaker = Breaker(2, 5.0, clock)
    breaker.failed()
    breaker.failed()
    clock.now = 5.0
    assert breaker.allow()
    breaker.succeeded()
    breaker.failed()
    assert breaker.state == "closed"
