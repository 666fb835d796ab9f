"""Levels of an encoder that the first layers of a decoder read (deepstack): `vllm.model_executor.models.qwen3_vl`.

Internal: `deepstack_num_level` and `_get_deepstack_input_embeds` of such a model.
"""

import torch
from torch import nn

from vllm_gaudi_ucm.vllm_api.distributed import IntermediateTensors

__all__ = ["give_levels", "num_levels"]


def num_levels(model: nn.Module) -> int:
    """Returns how many levels of the encoder the decoder reads in addition to the last one. An embedding of a picture
    has the last level first, followed by the others.

    Reason: a model says so by an attribute of its own alone.
    Remove when: the protocol `SupportsMultiModal` has the number.
    """
    return int(vars(model).get("deepstack_num_level", 0))


def give_levels(model: nn.Module, levels: torch.Tensor) -> None:
    """Has the next forward add levels to the results of the first layers.

    levels: [rows, number of levels * hidden size]; zeros for rows of tokens.

    Reason: the model keeps levels in buffers of its own, which `embed_input_ids` fills by a mask, and which the forward
    clears if a number on the host says so. A graph repeats neither.
    Remove when: the forward takes them as an argument.
    """
    each = levels.chunk(num_levels(model), dim=-1)
    names = {f"deepstack_input_embeds_{number}": level for number, level in enumerate(each)}
    # found before the method of its class
    vars(model)["_get_deepstack_input_embeds"] = lambda num_tokens: IntermediateTensors(names)
