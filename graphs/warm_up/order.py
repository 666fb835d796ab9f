"""The order in which cold buckets are warmed: always the one that saves the steps most, as far as is known by then."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.warm_up.demand import Demand
from vllm_gaudi_ucm.graphs.warm_up.graph_key import BucketKey


class WarmUpOrder:
    """Weighs buckets by steps x seconds saved against what is warm; live steps change the weights.

    Args:
        buckets: all there are.
        usage: steps that are expected, e.g. those of a phase log.
    """

    def __init__(self, buckets: BucketSet, usage: Steps | None) -> None:
        forward, logits = Demand.of_forward(buckets, usage), Demand.of_logits(buckets, usage)
        self._kinds: tuple[tuple[Sequence[BucketKey], Demand], ...] = (
            (buckets.forward, forward),
            (buckets.logits, logits),
        )
        self._places = {key: (demand.seen, index) for keys, demand in self._kinds for index, key in enumerate(keys)}

    def count(self, key: BucketKey) -> None:
        """A step asked for `key` while it was cold. For one thread; another one may ask for `first` meanwhile."""
        seen, index = self._places[key]
        seen[index] += 1

    def first(self, cold: Collection[BucketKey], warm: Collection[BucketKey]) -> BucketKey | None:
        """What to warm next of `cold`, or None if nothing is cold. A maximum, without which steps do not run, is first.

        Equal savings leave the order of cost, so that the same steps always give the same order.
        """
        missing = [keys[-1] for keys, _ in self._kinds if keys[-1] in cold]
        if missing or not cold:
            return missing[0] if missing else None
        best = [self._best(keys, demand, cold, warm) for keys, demand in self._kinds]
        return max(best, key=lambda found: found[0])[1]

    @staticmethod
    def _best(
        keys: Sequence[BucketKey], demand: Demand, cold: Collection[BucketKey], warm: Collection[BucketKey]
    ) -> tuple[float, BucketKey]:
        """(seconds saved, key); less than nothing where none of the kind is cold."""
        candidates = np.array([key in cold for key in keys])
        savings = np.where(candidates, demand.savings(np.array([key in warm for key in keys]), candidates), -1.0)
        index = int(np.argmax(savings))
        return float(savings[index]), keys[index]
