"""Workers whose graphs take different memory, or fail on one of them alone, keep the same graphs warm."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.graphs.warm_up.sets import server_buckets
from tests.graphs.warm_up.warm_up import GIB, Machine
from vllm_gaudi_ucm.graphs.warm_up.order import choose_skeleton
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.graphs.warm_up.records import GraphState
from vllm_gaudi_ucm.graphs.warm_up.warm_up import GraphRuns, WarmUp


class _Table:
    """Where the threads of a test meet: each gives a value and gets all of them, as ranks do over gloo."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._values: dict[int, int] = {}

    def meet(self, rank: int, value: int) -> list[int]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values.values())
        self._barrier.wait()
        return values


class _Rank:
    def __init__(self, table: _Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def all_of(self, is_true: bool) -> bool:
        return all(self._table.meet(self._rank, int(is_true)))

    def most(self, value: int) -> int:
        return max(self._table.meet(self._rank, value))


def _warm_together(machines: list[Machine], memory_budget: int) -> list[WarmUp]:
    table = _Table(len(machines))
    buckets = server_buckets()
    warm_ups = []
    for rank, machine in enumerate(machines):
        run: Callable[..., None] = machine.run
        warm_ups.append(
            WarmUp(
                ReadyBuckets(buckets),
                GraphRuns(run, run),
                lambda machine=machine: machine.free,
                lambda progress: None,
                memory_budget,
                lambda machine=machine: machine.now,
                agreement=_Rank(table, rank),
            )
        )

    def warm(warm_up: WarmUp) -> None:
        warm_up.run_skeleton(choose_skeleton(buckets, None, 3))
        warm_up.run_all()

    threads = [threading.Thread(target=warm, args=(warm_up,)) for warm_up in warm_ups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return warm_ups


def test_all_keep_what_all_can_keep() -> None:
    """The second worker's graphs are twice as large, and the third has less memory free."""
    machines = [Machine(), Machine(size=2 * GIB), Machine(free=60 * GIB)]
    warm_ups = _warm_together(machines, 40 * GIB)
    first, *others = (warm_up.ready.state.warm_keys for warm_up in warm_ups)
    assert all(keys == first for keys in others)
    assert 2 < len(first) <= 20
    assert all(warm_up.ready.dropped.keys() == warm_ups[0].ready.dropped.keys() for warm_up in warm_ups)
    assert machines[0].ran == machines[1].ran == machines[2].ran


def test_a_graph_that_fails_in_one_worker_is_dropped_by_all() -> None:
    machines = [Machine(), Machine()]
    alone = _warm_together([Machine()], 100 * GIB)[0]
    skeleton = set(choose_skeleton(alone.ready.buckets, None, 3).keys)
    broken = next(key for key in alone.ready.buckets.forward if key not in skeleton)
    machines[1].broken[broken] = RuntimeError("out of memory")
    first, second = _warm_together(machines, 100 * GIB)
    assert broken not in first.ready.state.warm_keys
    assert first.ready.state.warm_keys == second.ready.state.warm_keys == alone.ready.state.warm_keys - {broken}
    reasons = [
        record.reason
        for warm_up in (first, second)
        for record in warm_up.summary().records
        if record.state is GraphState.FAILED
    ]
    assert reasons == ["failed in another worker", "RuntimeError: out of memory"]
