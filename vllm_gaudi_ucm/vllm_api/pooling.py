"""Pooling models, which answer with embeddings, scores or classes: `vllm.v1.pool`, `vllm.pooling_params`.

Internal: `PoolingMetadata` and `PoolingStates`, which a model's pooler reads; `LateInteractionRunner`, which scores
documents by the token embeddings of a query; `PoolingParams`, the parameters of a request.
"""

from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.pooling_params import PoolingParams
from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

if TYPE_CHECKING:
    from collections.abc import Set

__all__ = ["LateInteractionRunner", "PoolerOfModel", "PoolingMetadata", "PoolingParams", "PoolingStates"]

PoolerOutput = torch.Tensor | list[torch.Tensor | None] | None
"""An output for each request; None, or an entry that is None, if a prompt is not finished."""


class PoolerOfModel(Protocol):
    """A model's pooler: an `nn.Module` that makes the outputs of requests from their hidden states.

    Reason: vLLM's class `Pooler` is imported with all heads and methods, which a worker of another model never needs.
    Remove when: it has a module of its own.
    """

    def to(self, device: torch.device) -> Any: ...

    def get_supported_tasks(self) -> "Set[Any]": ...

    def get_pooling_updates(self, task: Any) -> Any: ...

    def __call__(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput: ...
