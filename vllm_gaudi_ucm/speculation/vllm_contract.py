"""What speculative decoding takes from inside vLLM: each entry names its reason and when to remove it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray


def propose_ngrams(
    rows: NDArray[np.int64],
    num_tokens: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    min_n: int,
    max_n: int,
    max_model_len: int,
    drafts: NDArray[np.int32],
    num_drafts: NDArray[np.int32],
) -> None:
    """vLLM's n-gram search, compiled by numba at its first call.

    Args:
        rows: [requests] rows of the tables to search for.
        num_tokens, token_ids: [table rows], [table rows, width].
        min_n, max_n: lengths of the n-grams.
        max_model_len: tokens of the longest request.
        drafts, num_drafts: [table rows, most drafts], [table rows]; written in the rows asked for.

    Raises:
        ImportError: numba is not installed.

    Reason: `NgramProposer.propose` wants a copy of all token ids in batch order, has buffers for `max_num_seqs` rows
    only, which a table with preempted requests exceeds, and looks its requests up in a list.
    Remove when: it takes rows of a table.
    """
    import numba
    from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

    threads = numba.get_num_threads()
    # more of them do not pay (vLLM caps them at one), and they would take the cores of the model
    numba.set_num_threads(1)
    # an array, which numba compiles for as well as for the list that the annotation says
    batch_propose_numba(
        cast(Any, rows), num_tokens, token_ids, min_n, max_n, max_model_len, drafts.shape[1], drafts, num_drafts
    )
    numba.set_num_threads(threads)
