"""Tracks which buckets are warm, cold or dropped, while some are still being warmed."""

import threading
from collections.abc import Collection

from vllm_gaudi_ucm.graphs.lookup import BucketSet, NotWarmError, WarmState
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.warm_up.order import WarmUpOrder
from vllm_gaudi_ucm.graphs.warm_up.records import BucketKey, graph_name


class ReadyBuckets:
    """The buckets of an engine; `state` holds the warm ones.

    One thread may look up in `state` while another one marks and drops: each change makes a new state, so a look-up
    takes no lock. While some buckets are cold, it costs two look-ups in a `BucketSet`, afterwards one.

    Args:
        buckets: all buckets. Their maximum cannot be dropped.
        usage: steps that are expected, for the order in which buckets are warmed.
    """

    def __init__(self, buckets: BucketSet, usage: Steps | None = None) -> None:
        self.buckets = buckets
        self._order = WarmUpOrder(buckets, usage)
        self._keys: frozenset[BucketKey] = frozenset((*buckets.forward, *buckets.logits))
        self._dropped: dict[BucketKey, str] = {}
        self._changes = threading.Lock()
        self.state = self._state_of(frozenset())

    @property
    def maximum(self) -> tuple[ForwardShape, int]:
        """The configured maximum, forward shape and logits rows."""
        most = self.buckets.limits.maximum
        return most.forward, most.logits

    def count(self, best: Bucket, ready: Bucket) -> None:
        """Counts a step that ran in `ready` because `best` is cold, so that requested buckets are warmed first.
        The
        keys that differ are the cold ones: a warm key would have been found.
        """
        wanted = best.forward
        if wanted != ready.forward:
            self._order.count(wanted)
        if best.logits != ready.logits:
            self._order.count(best.logits)

    def logits_rows(self, count: int) -> int:
        """Returns the rows of the smallest warm logits bucket that holds `count`. Does not count the step: it was
        looked up before, or has a graph of its own.
        """
        warm = self.state.warm
        if warm is None:
            raise NotWarmError(f"{count} logits rows before the configured maximum is warm; run the skeleton first")
        return warm.logits_rows(count)

    def mark_warm(self, key: BucketKey) -> None:
        """Lets look-ups return `key`, whose graph exists now. Marking twice has no effect."""
        with self._changes:
            self._check_known(key)
            if key in self._dropped:
                raise ValueError(f"{graph_name(key)} was dropped ({self._dropped[key]}) and cannot become warm")
            self.state = self._state_of(self.state.warm_keys | {key})

    def drop(self, key: BucketKey, reason: str) -> None:
        """Drops `key`, which will never be warm; its steps run in the next larger bucket."""
        with self._changes:
            self._check_known(key)
            if key in self.maximum or key in self.state.warm_keys:
                which = "the configured maximum" if key in self.maximum else "warm"
                raise ValueError(f"{graph_name(key)} is {which} and cannot be dropped: steps run in it")
            self._dropped.setdefault(key, reason)
            self.state = self._state_of(self.state.warm_keys)

    def next_cold(self) -> BucketKey | None:
        """Returns the cold bucket that saves the most seconds compared with the warm ones, by expected and by observed
        steps.

        The configured maximum comes before everything else. None if no bucket is cold.
        """
        state = self.state
        return self._order.first(state.cold_keys, state.warm_keys)

    def is_warm(self, key: BucketKey) -> bool:
        return key in self.state.warm_keys

    @property
    def cold(self) -> frozenset[BucketKey]:
        """Returns the buckets that are neither warm nor dropped."""
        return self.state.cold_keys

    @property
    def dropped(self) -> dict[BucketKey, str]:
        with self._changes:
            return dict(self._dropped)

    @property
    def progress(self) -> tuple[int, int]:
        """Returns (warm, warm and cold) graphs; dropped ones do not count."""
        state = self.state
        return len(state.warm_keys), len(state.warm_keys) + len(state.cold_keys)

    def _check_known(self, key: BucketKey) -> None:
        if key not in self._keys:
            raise KeyError(f"{graph_name(key)} is not one of the {len(self._keys)} buckets")

    def _state_of(self, warm: frozenset[BucketKey]) -> WarmState:
        wanted = self._keys - self._dropped.keys()
        ready = self._subset(warm) if warm.issuperset(self.maximum) else None
        return WarmState(self._subset(wanted), ready, warm, wanted - warm)

    def _subset(self, keys: Collection[BucketKey]) -> BucketSet:
        forward = [key for key in keys if isinstance(key, ForwardShape)]
        logits = [key for key in keys if isinstance(key, int)]
        return BucketSet(forward, logits, self.buckets.limits, self.buckets.cost)
