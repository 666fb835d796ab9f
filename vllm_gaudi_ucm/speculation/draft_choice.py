"""Chooses drafts from the logits of a draft model: the likeliest tokens, or random ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.sampling_params import SamplingType

from vllm_gaudi_ucm.execution.graph_manager import Compile, Stage, uncompiled
from vllm_gaudi_ucm.ops.likeliest_tokens import likeliest_tokens
from vllm_gaudi_ucm.ops.row_noise.api import exponential_noise, row_keys, token_mixes
from vllm_gaudi_ucm.sampling.slot_noise import DRAFT_DOMAIN
from vllm_gaudi_ucm.sampling.stages.token_choice import choose_by_noise, temper

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest
    from vllm_gaudi_ucm.sampling.draft_probabilities import DraftProbabilities

Likeliest = Callable[[torch.Tensor], torch.Tensor]


class DraftChoice:
    """Chooses the likeliest tokens.

    likeliest: int64 [rows] of float32 [rows, vocabulary] on the device.
    """

    def __init__(self, likeliest: Likeliest = likeliest_tokens) -> None:
        self.likeliest = likeliest

    def begin(self, requests: Sequence[LiveRequest]) -> None:
        """Begins the drafts of a step. requests: all of the step."""

    def choose(
        self, logits: torch.Tensor, rows: NDArray[np.int64], num_tokens: NDArray[np.int64], draft: int
    ) -> torch.Tensor:
        """Chooses a draft of each row.

        Args:
            logits: float32 [at least rows, vocabulary]; rows beyond are pads.
            rows: int64 [rows], of the request table.
            num_tokens: int64 [rows], tokens of each request, not counting drafts.
            draft: the number of the request's drafts before this one.

        Returns:
            int64, as many as `logits` has rows, on the device.
        """
        return self.likeliest(logits)


class RandomDrafts(DraftChoice):
    """Draws drafts from the draft model's distribution at each request's temperature, and keeps that distribution.
    Requests that sample greedily get the likeliest tokens.

    Noise is a function of a request's seed and of the draft's position, independent of the noise that verifies it.

    Args:
        kept: takes the distributions.
        max_rows: most logits rows of a pass.
    """

    def __init__(
        self,
        kept: DraftProbabilities,
        max_rows: int,
        likeliest: Likeliest = likeliest_tokens,
        stage: Stage = nullcontext,
        region: Compile = uncompiled,
    ) -> None:
        super().__init__(likeliest)
        device = kept.values.device
        self._kept = kept
        self._stage = stage
        self._draw = region(draw_drafts)
        self._mixes = torch.from_numpy(token_mixes(kept.values.shape[1])).to(device)
        self._temperature = torch.zeros(max_rows, device=device)
        self._keys = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._places = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._requests: dict[int, LiveRequest] = {}
        # the device may copy them until the step's tokens are read
        self._copied: list[torch.Tensor] = []
        self._copied_before: list[torch.Tensor] = []

    def begin(self, requests: Sequence[LiveRequest]) -> None:
        self._copied, self._copied_before = [], self._copied
        random = [one for one in requests if one.sampling_params.sampling_type != SamplingType.GREEDY]
        self._requests = {request.row: request for request in random}
        self._kept.begin([request.request_id for request in random])

    def choose(
        self, logits: torch.Tensor, rows: NDArray[np.int64], num_tokens: NDArray[np.int64], draft: int
    ) -> torch.Tensor:
        requests = [self._requests.get(row) for row in rows.tolist()]
        if not any(requests):
            return self.likeliest(logits)
        count = len(logits)
        temperature, places = np.zeros(count, np.float32), np.zeros(count, np.int64)
        seeds, keys = np.zeros(len(rows), np.int64), np.zeros(count, np.int32)
        for index, request in enumerate(requests):
            if request is not None:
                temperature[index] = request.sampling_params.temperature
                places[index] = self._kept.place(request.request_id, draft)
                seeds[index] = request.noise_seed or 0
        keys[: len(rows)] = row_keys(seeds, num_tokens + draft, DRAFT_DOMAIN)
        return self._run(logits, temperature, keys, places)

    def warm(self, logits: torch.Tensor) -> None:
        """Runs the choice once, of pads. logits: float32 [rows of a bucket, vocabulary]."""
        count = len(logits)
        self._run(logits, np.zeros(count, np.float32), np.zeros(count, np.int32), np.zeros(count, np.int64))

    def refill(self) -> None:
        """Zeroes all tensors that outlive a step again, after a warm-up that computed nothing."""
        self._kept.refill()
        for tensor in (self._temperature, self._keys, self._places):
            tensor.zero_()

    def _run(
        self,
        logits: torch.Tensor,
        temperature: NDArray[np.float32],
        keys: NDArray[np.int32],
        places: NDArray[np.int64],
    ) -> torch.Tensor:
        staged = [
            self._staged(self._temperature, torch.from_numpy(temperature)),
            self._staged(self._keys, torch.from_numpy(keys)),
            self._staged(self._places, torch.from_numpy(places)),
        ]
        with self._stage("random drafts"):
            tokens: torch.Tensor = self._draw(logits, *staged, self._mixes, self._kept.values)
            return tokens

    def _staged(self, static: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self._copied.append(values)
        part = static[: len(values)]
        part.copy_(values, non_blocking=True)
        return part


def draw_drafts(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor,
    mixes: torch.Tensor,
    kept: torch.Tensor,
) -> torch.Tensor:
    """Returns a token of each row, int64 [rows], and writes the distribution that it was drawn from.

    Args:
        logits: float32 [rows, vocabulary].
        temperature: float32 [rows], 0 for the likeliest token.
        keys, mixes: of the noise, see `exponential_noise`.
        places: int64 [rows], of the distributions in `kept`, float32 [places, vocabulary].
    """
    probabilities = temper(logits, temperature).softmax(dim=-1, dtype=torch.float32)
    kept.index_copy_(0, places, probabilities)
    return choose_by_noise(probabilities, logits, temperature, exponential_noise(keys, mixes))
