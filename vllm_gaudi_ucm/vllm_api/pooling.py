"""Pooling models, which answer with embeddings, scores or classes: `vllm.v1.pool`, `vllm.pooling_params`.

Internal: `PoolingMetadata` and `PoolingStates`, which a model's pooler reads; `LateInteractionRunner`, which scores
documents by the token embeddings of a query; `PoolingParams`, the parameters of a request.
"""

from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from vllm.pooling_params import PoolingParams
from vllm.v1.outputs import PoolerOutput
from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

if TYPE_CHECKING:
    from collections.abc import Set

    from torch import nn
    from vllm.config import VllmConfig

__all__ = [
    "LateInteractionRunner",
    "PoolerOfModel",
    "PoolerOutput",
    "PoolingMetadata",
    "PoolingParams",
    "PoolingStates",
    "late_interaction",
    "pooler_of",
    "pooling_tasks",
]


class PoolerOfModel(Protocol):
    """A model's pooler: an `nn.Module` that makes the outputs of requests from their hidden states.

    Reason: vLLM's class `Pooler` is imported with all heads and methods, which a worker of another model never needs.
    Remove when: it has a module of its own.
    """

    def get_supported_tasks(self) -> "Set[Any]": ...

    def get_pooling_updates(self, task: Any) -> Any: ...

    def __call__(self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput: ...


def pooler_of(model: "nn.Module") -> PoolerOfModel:
    """Returns the pooler of a pooling model."""
    return cast("PoolerOfModel", model.pooler)


def pooling_tasks(model: "nn.Module") -> tuple[Any, ...]:
    """Returns the names of the tasks that a pooling model supports."""
    return tuple(sorted(pooler_of(model).get_supported_tasks()))


def late_interaction(vllm_config: "VllmConfig", on_cuda: bool) -> LateInteractionRunner:
    """Returns the state of late-interaction scoring. on_cuda: only there, vLLM's Triton kernel may score."""
    pooler = vllm_config.model_config.pooler_config
    return LateInteractionRunner(enable_flash=on_cuda and bool(getattr(pooler, "enable_flash_late_interaction", False)))
