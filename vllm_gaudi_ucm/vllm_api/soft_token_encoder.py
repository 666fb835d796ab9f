"""Gemma 4's encoder of pictures: `vllm.model_executor.models.gemma4_mm`, with Transformers' modules in it.

Internal: `vision_tower`, its `patch_embedder`, layers and `pooler`, and `embed_vision` of such a model.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

__all__ = ["SoftTokenEncoder"]


class SoftTokenEncoder:
    """Runs Gemma 4's encoder on a picture that is padded to a number of tokens.

    The host orders patches, so that a token's patches are next to each other, and masks the pads. Shapes on the device
    depend only on the number of tokens.

    Reason: the model reads the memory of an accelerator, which a CPU lacks, and takes the embeddings out by a mask.
    Remove when: it encodes pictures on a CPU, and its buffers for `SupportsEncoderCudaGraph` are filled from the host.

    unit: sizes are multiples of so many tokens.
    """

    unit = 1

    def __init__(self, model: nn.Module) -> None:
        self._model = cast(Any, model)
        self._tower = self._model.vision_tower
        self._side: int = self._tower.config.pooling_kernel_size

    @classmethod
    def of(cls, model: nn.Module) -> "SoftTokenEncoder | None":
        """Returns the encoder of a model; None if it has another kind of encoder."""
        tower = getattr(model, "vision_tower", None)
        pools = all(hasattr(tower, name) for name in ("patch_embedder", "encoder", "pooler"))
        return cls(model) if pools and hasattr(model, "embed_vision") else None

    def count(self, inputs: Mapping[str, object]) -> int:
        """Returns the tokens of a picture."""
        _, positions = _patches(inputs)
        return int((positions[:, 0] >= 0).sum()) // self._side**2

    def empty(self, tokens: int) -> Mapping[str, object]:
        """Returns the inputs of a picture of zeros, on the host: one row of tokens."""
        places = torch.cartesian_prod(torch.arange(self._side), torch.arange(self._side * tokens)).flip(1)
        width = 3 * self._tower.config.patch_size**2
        return {"pixel_values": torch.zeros((1, len(places), width)), "pixel_position_ids": places.unsqueeze(0)}

    def padded(self, inputs: Mapping[str, object], tokens: int) -> dict[str, torch.Tensor]:
        """Returns what `run` takes, on the host. tokens: of the result."""
        pixels, positions = _patches(inputs)
        own = positions[:, 0] >= 0
        pixels, positions = pixels[own].float(), positions[own].long()
        column, row = (positions // self._side).unbind(1)
        order = (row * (int(column.max()) + 1) + column).argsort(stable=True)
        pads = tokens * self._side**2 - len(order)
        mask = torch.zeros((1, 1, 1, len(order) + pads), dtype=self._model.model_dtype)
        mask[..., len(order) :] = torch.finfo(mask.dtype).min
        return {
            "pixel_values": torch.nn.functional.pad(pixels[order], (0, 0, 0, pads)).unsqueeze(0),
            "positions": torch.nn.functional.pad(positions[order], (0, 0, 0, pads)).unsqueeze(0),
            "mask": mask,
        }

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the embeddings [tokens, width]; the picture's are first. inputs: on the device."""
        tower, positions, mask = self._tower, inputs["positions"], inputs["mask"]
        no_pads = torch.zeros(positions.shape[:2], dtype=torch.bool, device=positions.device)
        hidden = tower.patch_embedder(inputs["pixel_values"], positions, no_pads).to(mask.dtype)
        places = tower.encoder.rotary_emb(hidden, positions)
        for layer in tower.encoder.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=places, position_ids=positions)
        each = hidden[0].float().unflatten(0, (-1, self._side**2)).sum(1) / self._side**2
        pooled = each.to(mask.dtype).float() * tower.pooler.root_hidden_size
        if tower.config.standardize:
            pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
        found: torch.Tensor = self._model.embed_vision(inputs_embeds=pooled.to(mask.dtype).unsqueeze(0)).squeeze(0)
        return found


def _patches(inputs: Mapping[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [patches, numbers of a patch] and [patches, 2] x and y of the one picture; pads have -1."""
    (pixels,), (positions,) = (cast(torch.Tensor, inputs[name]) for name in ("pixel_values", "pixel_position_ids"))
    return pixels, positions
