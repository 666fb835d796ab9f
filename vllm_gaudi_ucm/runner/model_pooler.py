"""A model's pooler: makes embeddings, scores or classes of hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from vllm_gaudi_ucm.vllm_api.pooling import PoolingMetadata, PoolingParams, PoolingStates

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_ucm.vllm_api.pooling import PoolerOfModel, PoolerOutput


class ModelPooler:
    """A model's pooler on its device.

    On a Gaudi this is the host: the shapes of a pooler's operations depend on the requests, and each would be compiled
    in a step. The hidden states of a bucket are copied as a whole there, which compiles nothing.

    Args:
        model: a pooling model. Its pooler moves to the device.
        device: the device of the pooler.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._pooler = cast("PoolerOfModel", model.pooler)
        self.device = device
        self._pooler.to(device)

    @property
    def tasks(self) -> tuple[Any, ...]:
        """Returns the names of the tasks that the model supports."""
        return tuple(sorted(self._pooler.get_supported_tasks()))

    def complete(self, params: PoolingParams) -> PoolingParams:
        """Returns a request's parameters with those that its task needs."""
        self._pooler.get_pooling_updates(params.task).apply(params)
        return params

    def pool(self, hidden: torch.Tensor, metadata: PoolingMetadata) -> PoolerOutput:
        """Returns an output for each request of the metadata; None, or an entry that is None, for unfinished ones.

        hidden: [rows, hidden size], the rows of all requests, one after the other, on the pooler's device.
        """
        return self._pooler(hidden_states=hidden, pooling_metadata=metadata)

    def pool_dummies(self, hidden: torch.Tensor, most_requests: int) -> None:
        """Runs every task once over hidden states that belong to no request.

        hidden: [rows, hidden size]. The rows are shared out evenly among `most_requests`, or one to each.
        """
        rows = len(hidden)
        count = min(rows, most_requests)
        lengths = np.full(count, rows // count, np.int32)
        lengths[-1] += rows % count
        for task in self.tasks:
            params = self.complete(PoolingParams(task=task, use_activation=True))
            requests = [PooledRequest(params, [0] * int(length)) for length in lengths]
            self.pool(hidden.to(self.device), pooling_metadata(requests, lengths, lengths, self.device))


@dataclass(frozen=True)
class PooledRequest:
    """A live request: its parameters, its prompt, and the hidden states of earlier chunks of the prompt."""

    params: PoolingParams
    prompt: list[int]
    states: PoolingStates = field(default_factory=PoolingStates)


def pooling_metadata(
    requests: Sequence[PooledRequest], scheduled: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], device: torch.device
) -> PoolingMetadata:
    """Returns what a pooler reads of the requests of a step.

    scheduled: int32 [requests], rows of each. ends: int32 [requests], tokens of each that are computed after the step.
    device: device of the hidden states.
    """
    lengths = torch.tensor([len(one.prompt) for one in requests], dtype=torch.int32)
    prompts = None
    if any(one.params.requires_token_ids for one in requests):
        # poolers read as many tokens of a row as the prompt has
        prompts = torch.full((len(requests), int(lengths.max())), -1, dtype=torch.int64)
        for row, one in zip(prompts, requests, strict=True):
            row[: len(one.prompt)] = torch.tensor(one.prompt)
    metadata = PoolingMetadata(
        prompt_lens=lengths,
        prompt_token_ids=None,
        prompt_token_ids_cpu=prompts,
        pooling_params=[one.params for one in requests],
        pooling_states=[one.states for one in requests],
    )
    metadata.build_pooling_cursor(scheduled, torch.from_numpy(ends), device)
    return metadata
