"""The noise that random tokens are drawn with: of a request's seed and of the token's position, in any batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.ops.row_noise.api import (
    DOUBLE_DOMAIN,
    exponential_noise,
    exponential_noise_double,
    row_keys,
    token_mixes,
)

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest


_INT64 = 1 << 63


def noise_seed(seed: int) -> int:
    """Returns 64 bits, as an int64, for an integer of any size: the integer itself if it fits, otherwise its hash.

    Children of a request with `n` have seed + i, which may exceed the seeds that a server accepts.
    """
    if -_INT64 <= seed < _INT64:
        return seed
    data = seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def noise_keys(slots: Sequence[LiveRequest], domain: int = 0) -> NDArray[np.int32]:
    """Returns [slots], the keys of the noise of each request's next token. domain: each has different noise."""
    seeds = np.fromiter((request.noise_seed or 0 for request in slots), np.int64, len(slots))
    lengths = (len(request.prompt_token_ids) + len(request.output_token_ids) for request in slots)
    return row_keys(seeds, np.fromiter(lengths, np.int64, len(slots)), domain)


class SlotNoise:
    """Noise at the true number of rows, for a sampler that requests it.

    Args:
        double: noise in float64.
    """

    def __init__(self, double: bool) -> None:
        self._double = double
        self._slots: Sequence[LiveRequest] = ()
        self._mixes = torch.zeros(0, dtype=torch.int32)

    @contextmanager
    def drawn_for(self, slots: Sequence[LiveRequest]) -> Iterator[None]:
        """Inside of it, row i is of request i."""
        self._slots = slots
        yield
        self._slots = ()

    def like(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] as the logits, of an exponential distribution."""
        if len(self._mixes) != logits.shape[1] or self._mixes.device != logits.device:
            self._mixes = torch.from_numpy(token_mixes(logits.shape[1])).to(logits.device)
        keys = torch.from_numpy(noise_keys(self._slots)).to(logits.device, non_blocking=True)
        if not self._double:
            return exponential_noise(keys, self._mixes)
        more = torch.from_numpy(noise_keys(self._slots, DOUBLE_DOMAIN)).to(logits.device, non_blocking=True)
        return exponential_noise_double(keys, more, self._mixes)
