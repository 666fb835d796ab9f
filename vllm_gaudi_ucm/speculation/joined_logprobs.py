"""Logprobs of several tokens per request, put together from those of each position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.v1.outputs import LogprobsLists


def join_logprobs(positions: Sequence[tuple[Sequence[int], LogprobsLists | None]]) -> LogprobsLists | None:
    """The tokens of request 0, then those of request 1, and so on, with the index of each request's first.

    Positions differ in width as requests drop out that asked for more; what a narrower one lacks is padded with token 0
    at -inf, which vLLM never reads, since it cuts every request to the width that it asked for.

    Args:
        positions: of each position the requests that it sampled (numbers, all of them at position 0), and their
            logprobs, row i of request i of these; None where none of them asked.
    """
    if all(logprobs is None for _, logprobs in positions):
        return None
    if len(positions) == 1:
        return positions[0][1]
    requests = np.concatenate([np.array(members, np.int64) for members, _ in positions])
    order = requests.argsort(kind="stable")
    found = [_tables(len(members), logprobs) for members, logprobs in positions]
    width = max(tokens.shape[1] for tokens, _, _ in found)
    counts = np.bincount(requests)
    return LogprobsLists(
        np.concatenate([_widened(tokens, width, 0) for tokens, _, _ in found])[order],
        np.concatenate([_widened(scores, width, -np.inf) for _, scores, _ in found])[order],
        np.concatenate([ranks for _, _, ranks in found])[order],
        [0, *counts.cumsum().tolist()],
    )


def _tables(rows: int, logprobs: LogprobsLists | None) -> tuple[NDArray, NDArray, NDArray]:
    if logprobs is None:
        return np.zeros((rows, 0), np.int32), np.zeros((rows, 0), np.float32), np.zeros(rows, np.int64)
    return logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks


def _widened(table: NDArray, width: int, pad: float) -> NDArray:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=pad)
