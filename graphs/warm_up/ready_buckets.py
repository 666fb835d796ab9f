"""Warm and cold buckets, and the look-up that returns warm ones only."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import NamedTuple

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.warm_up.order import WarmUpOrder
from vllm_gaudi_ucm.graphs.warm_up.records import BucketKey, graph_name


class NotWarmError(RuntimeError):
    """A step was looked up before the configured maximum was warm."""


class WarmState(NamedTuple):
    """Which graphs are warm, at one moment. Immutable: a change in another thread never shows halfway."""

    wanted: BucketSet
    """Every bucket that is or will be warm."""
    warm: BucketSet | None
    """None until the configured maximum is warm, forward shape and logits rows: only then every step has a bucket."""
    warm_keys: frozenset[BucketKey]
    cold_keys: frozenset[BucketKey]

    def lookup(self, step: Bucket) -> tuple[Bucket, Bucket]:
        """(the cheapest bucket that dominates `step`, the cheapest that does and is warm).

        A pure function of the step and of the warm keys: workers that agree on these choose the same graph.

        Raises:
            LimitsError: the step exceeds the limits that the buckets were made for.
            NotWarmError: not even the configured maximum is warm.
        """
        if self.warm is None:
            raise NotWarmError(f"step {step.to_list()} before the configured maximum is warm; run the skeleton first")
        best = self.wanted.lookup(step)
        return best, self.warm.lookup(step) if self.cold_keys else best


class ReadyBuckets:
    """Finds the cheapest warm bucket of a step while others are still being warmed.

    One thread may look up while another one marks and drops. A lookup takes no lock; as long as buckets are cold it
    costs two lookups in a `BucketSet`, afterwards one.

    Args:
        buckets: all of them. Their maximum can not be dropped.
        usage: steps that are expected, for the order in which buckets are warmed.
    """

    def __init__(self, buckets: BucketSet, usage: Steps | None = None) -> None:
        self.buckets = buckets
        self.maximum: tuple[ForwardShape, int] = (buckets.limits.maximum.forward, buckets.limits.maximum.logits)
        self._order = WarmUpOrder(buckets, usage)
        self._keys: frozenset[BucketKey] = frozenset((*buckets.forward, *buckets.logits))
        self._dropped: dict[BucketKey, str] = {}
        self._changes = threading.Lock()
        self._state = self._state_of(frozenset())

    def lookup(self, step: Bucket) -> Bucket:
        """The cheapest warm bucket that dominates `step`, see `WarmState.lookup`.

        Where a cheaper one is still cold, counts the step for it: what steps ask for is warmed first.
        """
        best, ready = self._state.lookup(step)
        if ready != best:
            self._count(best, ready)
        return ready

    def logits_rows(self, count: int) -> int:
        """Rows of the smallest warm logits bucket that holds `count`. Counts nothing: the step was looked up before,
        or has a graph of its own."""
        warm = self._state.warm
        if warm is None:
            raise NotWarmError(f"{count} logits rows before the configured maximum is warm; run the skeleton first")
        return warm.logits_rows(count)

    def mark_warm(self, key: BucketKey) -> None:
        """From now on lookups may return `key`, whose graph is there. Marking twice changes nothing."""
        with self._changes:
            self._check_known(key)
            if key in self._dropped:
                raise ValueError(f"{graph_name(key)} was dropped ({self._dropped[key]}) and can not become warm")
            self._state = self._state_of(self._state.warm_keys | {key})

    def drop(self, key: BucketKey, reason: str) -> None:
        """`key` will never be warm; its steps run in the next larger bucket."""
        with self._changes:
            self._check_known(key)
            if key in self.maximum or key in self._state.warm_keys:
                which = "the configured maximum" if key in self.maximum else "warm"
                raise ValueError(f"{graph_name(key)} is {which} and can not be dropped: steps run in it")
            self._dropped.setdefault(key, reason)
            self._state = self._state_of(self._state.warm_keys)

    def next_cold(self) -> BucketKey | None:
        """The cold bucket that saves the most seconds against what is warm, by expected and by seen steps.

        The configured maximum comes before everything else. None: nothing is cold.
        """
        state = self._state
        return self._order.first(state.cold_keys, state.warm_keys)

    def is_warm(self, key: BucketKey) -> bool:
        return key in self._state.warm_keys

    @property
    def cold(self) -> frozenset[BucketKey]:
        """What is neither warm nor dropped."""
        return self._state.cold_keys

    @property
    def dropped(self) -> dict[BucketKey, str]:
        """What was dropped, and why."""
        with self._changes:
            return dict(self._dropped)

    @property
    def progress(self) -> tuple[int, int]:
        """(warm, warm and cold) graphs; dropped ones do not count."""
        state = self._state
        return len(state.warm_keys), len(state.warm_keys) + len(state.cold_keys)

    def _count(self, best: Bucket, ready: Bucket) -> None:
        """What differs is what was cold: had it been warm, it would have been found."""
        wanted = best.forward
        if wanted != ready.forward:
            self._order.count(wanted)
        if best.logits != ready.logits:
            self._order.count(best.logits)

    def _check_known(self, key: BucketKey) -> None:
        if key not in self._keys:
            raise KeyError(f"{graph_name(key)} is none of the {len(self._keys)} buckets")

    def _state_of(self, warm: frozenset[BucketKey]) -> WarmState:
        wanted = self._keys - self._dropped.keys()
        ready = self._subset(warm) if warm.issuperset(self.maximum) else None
        return WarmState(self._subset(wanted), ready, warm, wanted - warm)

    def _subset(self, keys: Collection[BucketKey]) -> BucketSet:
        forward = [key for key in keys if isinstance(key, ForwardShape)]
        logits = [key for key in keys if isinstance(key, int)]
        return BucketSet(forward, logits, self.buckets.limits, self.buckets.cost)
