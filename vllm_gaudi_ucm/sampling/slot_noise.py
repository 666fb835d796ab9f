"""The noise that random tokens are drawn with: of a request's seed and of the token's position, in any batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.ops.rejection_sampling.api import accept_or_draw
from vllm_gaudi_ucm.ops.row_noise.api import (
    DOUBLE_DOMAIN,
    exponential_noise,
    exponential_noise_double,
    row_keys,
    token_mixes,
)
from vllm_gaudi_ucm.vllm_api.sampling import sample_with_exponential_noise

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.sampling.draft_probabilities import ProposedRows


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


DRAFT_DOMAIN = 0x2545F491
"""The domain of the noise that drafts are drawn with."""

_ACCEPTANCE_DOMAIN = 0x4F6CDD1D


def slot_uniforms(slots: Sequence[LiveRequest]) -> NDArray[np.float32]:
    """Returns [slots], random numbers between 0 and 1 that decide whether the drafts of the next tokens are accepted.

    Those, the noise of drafts and the noise of tokens are independent of each other.
    """
    keys = torch.from_numpy(noise_keys(slots, _ACCEPTANCE_DOMAIN))
    noise = exponential_noise(keys, torch.from_numpy(token_mixes(1)))
    uniforms: NDArray[np.float32] = noise.squeeze(1).neg().exp().numpy()
    return uniforms


class SlotNoise:
    """Draws tokens with noise at the true number of rows, for a sampler that requests it.

    Args:
        double: noise in float64.
    """

    def __init__(self, double: bool) -> None:
        self._double = double
        self._slots: Sequence[LiveRequest] = ()
        self._proposed: ProposedRows | None = None
        self._mixes = torch.zeros(0, dtype=torch.int32)

    @contextmanager
    def drawn_for(self, slots: Sequence[LiveRequest], proposed: ProposedRows | None = None) -> Iterator[None]:
        """Inside of it, row i is of request i. proposed: drafts that rows verify; None if there are none."""
        self._slots, self._proposed = slots, proposed
        yield
        self._slots, self._proposed = (), None

    def draw(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Returns int64 [rows], a token of each row. probabilities: float32 [rows, vocabulary], overwritten."""
        noise = self.like(probabilities)
        if self._proposed is None:
            return sample_with_exponential_noise(probabilities, noise)
        device = probabilities.device
        tokens, places, known = self._proposed
        of_drafts = known.index_select(0, torch.from_numpy(places).to(known.device)).to(device)
        uniforms = torch.from_numpy(slot_uniforms(self._slots)).to(device)
        return accept_or_draw(probabilities, torch.from_numpy(tokens).to(device), of_drafts, uniforms, noise)

    def like(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] as the logits, of an exponential distribution."""
        if len(self._mixes) != logits.shape[1] or self._mixes.device != logits.device:
            self._mixes = torch.from_numpy(token_mixes(logits.shape[1])).to(logits.device)
        keys = torch.from_numpy(noise_keys(self._slots)).to(logits.device, non_blocking=True)
        if not self._double:
            return exponential_noise(keys, self._mixes)
        more = torch.from_numpy(noise_keys(self._slots, DOUBLE_DOMAIN)).to(logits.device, non_blocking=True)
        return exponential_noise_double(keys, more, self._mixes)
