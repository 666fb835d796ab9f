"""Embeddings of tokens that each layer reads, in a model with pictures: `vllm.model_executor.models.gemma4_mm`.

Internal: `per_layer_embeddings` of such a model, and `embed_tokens_per_layer`, `embed_scale_per_layer` and the sizes of
its text model.
"""

from typing import Any, cast

import torch
from torch import nn

__all__ = ["embed_tokens"]

_GIVEN = "per_layer_embeddings"


def embed_tokens(model: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the embeddings [rows, width] of tokens, and gives the next forward those that its layers read.

    token_ids: int64 [rows], 0 for rows of pictures.

    Reason: the model copies them into a buffer for as many rows as a step has tokens; a bucket may have more, and a
    compiler may drop writes to a part of a buffer.
    Remove when: the forward takes them as an argument.
    """
    owner = cast(Any, model)
    if _GIVEN not in vars(model) or (text := owner.language_model.model).embed_tokens_per_layer is None:
        return cast(torch.Tensor, owner.embed_input_ids(token_ids))
    # or else the model would fill its buffer
    vars(model)[_GIVEN] = None
    found: torch.Tensor = owner.embed_input_ids(token_ids)
    known = token_ids * (token_ids < text.vocab_size_per_layer_input).to(token_ids.dtype)
    each = text.embed_tokens_per_layer(known) * text.embed_scale_per_layer
    vars(model)[_GIVEN] = each.view(len(token_ids), -1, text.hidden_size_per_layer_input)
    return found
