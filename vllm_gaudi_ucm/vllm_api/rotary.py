"""Rotary positions with several axes (M-RoPE): `vllm.model_executor.models`, `vllm.transformers_utils.config`.

Internal: `supports_mrope` and `get_mrope_input_positions`, by which a model computes the positions of a prompt;
`uses_mrope`, which says whether a configuration has several axes.
"""

from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import nn
from vllm.model_executor.models import SupportsMRoPE, supports_mrope
from vllm.transformers_utils.config import uses_mrope

from vllm_gaudi_ucm.vllm_api.steps import NewRequestData, prompt_tokens

__all__ = ["prompt_positions", "reads_axes"]


def reads_axes(model: nn.Module) -> bool:
    """Returns whether the model's forward takes positions of [axes, rows].

    Reason: a class that can take them also serves configurations that have one axis.
    Remove when: `supports_mrope` looks at the model's configuration.
    """
    config = vars(model).get("config")
    return supports_mrope(model) and config is not None and uses_mrope(config)


def prompt_positions(model: nn.Module, new: NewRequestData) -> tuple[NDArray[np.int64], int]:
    """Returns the positions of a request's prompt, int64 [axes, tokens], and what is added to the index of each token
    behind it.

    Reason: the model reads the grids of pictures, and would take a prompt of embeddings for one. They are positioned
    like text, and without tokens only their number counts.
    Remove when: `get_mrope_input_positions` knows the modality `prompt_embeds`.
    """
    features = [feature for feature in new.mm_features if feature.modality != "prompt_embeds"]
    positions, delta = cast(SupportsMRoPE, model).get_mrope_input_positions(prompt_tokens(new), features)
    return positions.numpy().astype(np.int64), int(delta)
