"""What speculative decoding takes from inside vLLM: each entry names its reason and when to remove it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def propose_ngram(
    token_ids: NDArray[np.int32], min_n: int, max_n: int, max_model_len: int, num_drafts: int
) -> NDArray[np.int32]:
    """vLLM's n-gram search in one request, compiled by numba at its first call.

    Args:
        token_ids: [tokens] of the request.
        min_n, max_n: lengths of the n-grams.
        max_model_len: tokens of the longest request.
        num_drafts: most drafts.

    Returns:
        [at most num_drafts].

    Raises:
        ImportError: numba is not installed.

    Reason: `NgramProposer.propose` wants a copy of all token ids in batch order, has buffers for `max_num_seqs` rows
    only, which a table with preempted requests exceeds, and starts numba's threads, which take the cores of a model on
    the CPU, for a loop that vLLM itself runs on one.
    Remove when: it takes rows of a table, and starts none.
    """
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as search

    return search(token_ids, min_n, max_n, max_model_len, num_drafts)
