"""Slots and cached contexts of a step in which each token has its own slot, from the runs of `TokenTable`."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.context_pairs import ContextPairs
from vllm_gaudi_ucm.batch.token_table import BEGIN


class _Runs(NamedTuple):
    """Runs request by request in flat order, in the order of positions, cut to a range of positions.

    request: int64 [runs] place in flat order. first, begin, step, length: int64 [runs], see TokenTable.
    """

    request: NDArray[np.int64]
    first: NDArray[np.int64]
    begin: NDArray[np.int64]
    step: NDArray[np.int64]
    length: NDArray[np.int64]


def run_slots(
    computed: NDArray[np.int64], new: NDArray[np.int64], requests: NDArray[np.int64], runs: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Returns [rows] the slots of the new tokens, in flat order.

    Args:
        computed, new: [requests] number of tokens before the new ones, and of new ones, in flat order.
        requests: [requests] row of `runs` for each request in flat order.
        runs: [requests, width, 3] of `TokenTable`.
    """
    cut = _cut(computed, computed + new, requests, runs)
    begin = cut.length.cumsum() - cut.length
    offset = np.arange(int(new.sum())) - begin.repeat(cut.length)
    return cut.first.repeat(cut.length) + cut.step.repeat(cut.length) * offset


def run_pairs(
    context: NDArray[np.int64], requests: NDArray[np.int64], runs: NDArray[np.int32], tile: int
) -> ContextPairs:
    """Returns the cached contexts as ranges of tiles: a pair is a run, ascending or descending.

    Args:
        context: [requests] cached tokens that the rows of a request see, in flat order.
        requests, runs: see `run_slots`.
    """
    cut = _cut(np.zeros_like(context), context, requests, runs)
    lowest = np.where(cut.step < 0, cut.first - cut.length + 1, cut.first)
    return ContextPairs(cut.request, lowest, (lowest % tile + cut.length).astype(np.int32), tile)


def _cut(
    begin: NDArray[np.int64], end: NDArray[np.int64], requests: NDArray[np.int64], runs: NDArray[np.int32]
) -> _Runs:
    """Returns the runs of each request with positions in [begin, end), cut to these."""
    begins = runs[requests, :, BEGIN]
    skipped = np.maximum(np.count_nonzero(begins <= begin[:, None], axis=1) - 1, 0)
    count = np.count_nonzero(begins < end[:, None], axis=1) - skipped
    count[end <= begin] = 0
    stop = count.cumsum()
    request = np.arange(len(requests)).repeat(count)
    # gathering by flat index costs as many runs as are in use
    place = (requests * runs.shape[1] + skipped - (stop - count)).repeat(count) + np.arange(len(request))
    first, start, step = runs.reshape(-1, 3).take(place, axis=0).astype(np.int64).T
    behind = np.empty_like(start)
    behind[:-1] = start[1:]
    used = count > 0
    behind[stop[used] - 1] = end[used]
    inside = np.maximum(start, begin[request])
    return _Runs(request, first + step * (inside - start), inside, step, behind - inside)
