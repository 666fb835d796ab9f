"""Loads a draft model beside the target's: its layers find their KV cache and their step under names of their own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from vllm.model_executor.model_loader import get_model

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

DRAFT_PREFIX = "draft_model"
"""What the names of a draft model's layers begin with."""


def load_draft_model(vllm_config: VllmConfig) -> nn.Module | None:
    """The model of `speculative_config.draft_model_config`; None without one.

    It shares the target's compilation configuration, where attention layers register themselves: so vLLM sizes and
    allocates the KV cache of both at once, in one group, and a request's block table serves both. Both must be in one
    group for that, which layers with full attention and one block size are.
    """
    config = vllm_config.speculative_config
    if config is None or config.method != "draft_model":
        return None
    own = copy.copy(vllm_config)
    own.model_config = config.draft_model_config
    own.quant_config = None
    return get_model(vllm_config=own, prefix=DRAFT_PREFIX, load_config=config.draft_load_config)


def is_draft_layer(name: str) -> bool:
    """Whether an attention layer is the draft model's."""
    return name.startswith(f"{DRAFT_PREFIX}.")
