"""The traffic of a mix, for `gaudi-ucm plan --mix`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm_tools.traffic.simulation import Simulation
from vllm_gaudi_ucm_tools.traffic.trace import mix_within


class MixTraffic:
    """A named mix under the limits that options give.

    Args:
        args: with the limits' options, see `add_limit_arguments`.
        name: the mix.

    Raises:
        ValueError: there is no such mix, or an option does not fit it.
    """

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self._mix = mix_within(args, name)

    @property
    def limits(self) -> Limits:
        return self._mix.limits

    def buckets(self, cost: CostModel, count: int) -> Iterator[Bucket]:
        """Yields the sizes of the first `count` steps, the same at each call."""
        yield from (record.bucket for record in Simulation(self._mix, cost, seed=0).steps(count))
