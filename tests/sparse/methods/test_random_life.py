"""Random lives of requests under KVStar: whatever happens, the worker is never asked for what it does not have."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse.steps import BLOCK_SIZE, Live, step_of
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode, SparseMeta
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStar

IDS = ("a", "b", "c")


@dataclass
class World:
    """A method, its live requests, and what a worker would have stored of them."""

    method: Any
    live: dict[str, Live] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    since_select: dict[str, int] = field(default_factory=dict)

    def event(self, kind: str, name: str, number: int) -> None:
        if kind == "add" and name not in self.live:
            self.method.request_begin(name, [0] * number)
            self.live[name] = Live(name, 1 + number)
        elif kind == "finish":
            self.live.pop(name, None)
            self.stored.pop(name, None)
            self.method.request_finished_in_scheduler(name)
        elif kind == "preempt" and name in self.live:
            self.live[name].computed = 0
            self.stored.pop(name, None)
            self.method.request_preempted(name)
        elif kind == "step":
            self.step(number)

    def step(self, number: int) -> None:
        scheduled = {}
        for name, request in self.live.items():
            left = request.num_tokens - request.computed
            request.drafts = [1] * (number % 4) if left == 1 else []
            scheduled[name] = min(left, 1 + number) + len(request.drafts)
        everything: Any = self.live
        meta = self.method.build_sparse_meta(step_of(scheduled, self.live), everything)
        self.check(meta)
        for name, count in scheduled.items():
            request = self.live[name]
            accepted = number % (1 + len(request.drafts))
            request.computed += count - len(request.drafts) + accepted
            if request.drafts:
                self.method.drafts_verified(name, len(request.drafts), accepted)
            if request.computed >= request.num_tokens:
                request.num_tokens = request.computed + 1

    def check(self, meta: SparseMeta) -> None:
        assert set(meta.requests) <= set(self.live)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=SparseMeta) == meta
        for name, found in meta.requests.items():
            request = self.live[name]
            full = (request.computed + 1) // BLOCK_SIZE
            assert 0 <= found.sink_blocks <= found.window_start <= full - 2
            assert 0 <= found.num_selected <= found.window_start - found.sink_blocks
            if found.mode == SelectionMode.SELECT:
                self.since_select[name] = 0
            else:
                self.since_select[name] += 1
                assert name in self.stored, "reused without a selection that was stored"
            if found.mode == SelectionMode.REUSE:
                assert found.window_start == self.stored[name]
            self.stored[name] = found.window_start
        for name in set(self.stored) - set(meta.requests):
            del self.stored[name]  # dense in this step


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "step", "step", "step", "step", "preempt", "finish"]),
        st.sampled_from(IDS),
        st.integers(0, 60),
    ),
    max_size=80,
)


@settings(max_examples=60)
@given(EVENTS, st.integers(1, 6), st.integers(1, 9))
def test_kvstar(events: list[tuple[str, str, int]], interval: int, duration: int) -> None:
    """covers: C5, C12, C17, C20"""
    options = {"min_tokens": 20, "checkpoint_interval": interval, "lock_duration": duration}
    world = World(KVStar(UcmSparseRole.SCHEDULER, options))
    world.method.register_block_size(BLOCK_SIZE)
    for event in events:
        world.event(*event)
        assert all(steps < duration for steps in world.since_select.values())
        metrics = world.method.metrics
        locked = sum(state.is_locked for state in world.method._states.values())
        assert metrics.lock_count - metrics.unlock_count == locked
        assert set(world.method._states) <= set(world.live)
    for name in IDS:
        world.event("finish", name, 0)
    assert not world.method._states


@settings(max_examples=40)
@given(EVENTS, st.sampled_from(["GSA", "ESA"]), st.integers(1, 5))
def test_methods_without_locks(events: list[tuple[str, str, int]], name: str, reuse: int) -> None:
    options = {"min_tokens": 20} | ({"reuse_steps": reuse} if name == "GSA" else {})
    world = World(UcmSparseFactory.create_sparse_method(name, UcmSparseRole.SCHEDULER, options))
    world.method.register_block_size(BLOCK_SIZE)
    for event in events:
        world.event(*event)
        assert all(steps < reuse for steps in world.since_select.values())
