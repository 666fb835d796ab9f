"""Pixtral's encoder of pictures (LLaVA with Pixtral, Mistral 3): `vllm.model_executor.models.pixtral`, `mistral3`.

Internal: the modules of `PixtralHFVisionModel`, `LlavaMultiModalProjector` and `Mistral3MultiModalProjector`; the
forward of `PixtralHFTransformer`; `position_ids_in_meshgrid`.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear

from vllm_gaudi_ucm.vllm_api.sequence_numbers import sequence_numbers

__all__ = ["PatchEncoder"]


class PatchEncoder:
    """Runs Pixtral's encoder on a picture that is padded to a number of tokens.

    The pads are a second sequence, which nothing reads. The host cuts pictures into patches, with a token's patches
    next to each other, so shapes on the device depend only on the number of tokens.

    Reason: the encoder's forward takes pictures in their own sizes.
    Remove when: it implements `SupportsEncoderCudaGraph`, whose buffers are filled from the host.

    unit: sizes are multiples of so many tokens. merges: several patches make a token, as in Mistral 3.
    """

    unit = 1

    def __init__(self, tower: nn.Module, projector: nn.Module) -> None:
        self._tower, self._projector = cast(Any, tower), cast(Any, projector)
        merger = getattr(projector, "patch_merger", None)
        self.merges = merger is not None
        self._side: int = merger.spatial_merge_size if merger is not None else 1
        self._rotary = deepcopy(self._tower.patch_positional_embedding).to("cpu")
        self._patch: int = self._tower.config.patch_size

    @classmethod
    def of(cls, model: nn.Module) -> "PatchEncoder | None":
        """Returns the encoder of a model; None if it has another kind of encoder, or takes a part of the patches."""
        tower, projector = getattr(model, "vision_tower", None), getattr(model, "multi_modal_projector", None)
        if not isinstance(tower, nn.Module) or projector is None or not hasattr(tower, "patch_positional_embedding"):
            return None
        found = cls(tower, projector)
        chosen = getattr(cast(Any, model).config, "vision_feature_select_strategy", "full")
        return found if found.merges or chosen == "full" else None

    def count(self, inputs: Mapping[str, object]) -> int:
        """Returns the tokens of a picture."""
        _, height, width = self._pixels(inputs).shape
        return height * width // (self._patch * self._side) ** 2

    def empty(self, tokens: int) -> Mapping[str, object]:
        """Returns the inputs of a picture of zeros, on the host."""
        side = self._patch * self._side
        norm, channels = self._tower.input_norm, self._tower.config.num_channels
        dtype = getattr(norm, "input_dtype", None) or self._tower.dtype
        return {"pixel_values": torch.zeros((1, channels, side, side * tokens), dtype=dtype)}

    def padded(self, inputs: Mapping[str, object], tokens: int) -> dict[str, torch.Tensor]:
        """Returns what `run` takes, on the host. tokens: of the result."""
        from vllm.model_executor.models.pixtral import position_ids_in_meshgrid

        pixels, patch, side = self._pixels(inputs), self._patch, self._side
        channels, rows, columns = len(pixels), pixels.shape[1] // patch, pixels.shape[2] // patch
        patches = pixels.reshape(channels, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
        grid = self._tower.config.image_size // patch
        positions = position_ids_in_meshgrid([torch.empty((1, 0, rows, columns))], max_width=grid)
        # patches of a token are next to each other
        order = torch.arange(rows * columns).view(rows // side, side, columns // side, side)
        order = order.permute(0, 2, 1, 3).reshape(-1)
        count, own = tokens * side**2, len(order)
        cos, sin = self._rotary(
            torch.empty(0, dtype=self._tower.dtype), _lengthened(positions.index_select(0, order), count)
        )
        return {
            "pixel_values": _lengthened(patches.reshape(own, -1).index_select(0, order), count),
            "cos": cos,
            "sin": sin,
            "cu_seqlens": sequence_numbers([own, count - own]),
            "max_seqlen": torch.tensor(count, dtype=torch.int32),
        }

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the embeddings [tokens, width]; the picture's are first. inputs: on the device."""
        tower, weight = self._tower, self._tower.patch_conv.weight
        patches = inputs["pixel_values"]
        patches = patches.to(weight.dtype) if tower.input_norm is None else tower.input_norm(patches, weight.dtype)
        hidden = tower.ln_pre(linear(patches, weight.reshape(len(weight), -1)).unsqueeze(0))
        places, longest = (inputs["cos"], inputs["sin"]), inputs["max_seqlen"]
        hidden = tower.transformer(
            hidden, places, inputs["cu_seqlens"], longest, None, return_all_hidden_states=False
        ).squeeze(0)
        if not self.merges:
            projected: torch.Tensor = self._projector(hidden)
            return projected
        return self._merged(hidden)

    def _merged(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [tokens, width] of Mistral 3's projector, whose own forward cuts rows by the sizes of pictures.

        hidden: [patches, width of the encoder].
        """
        projector, each = self._projector, self._side**2
        hidden = projector.norm(hidden)
        hidden = hidden.view(len(hidden) // each, each, -1).transpose(1, 2).flatten(1)
        hidden, _ = projector.linear_1(projector.patch_merger.merging_layer(hidden))
        found, _ = projector.linear_2(projector.act(hidden))
        return cast(torch.Tensor, found)

    def _pixels(self, inputs: Mapping[str, object]) -> torch.Tensor:
        """Returns [channels, height, width] of the one picture."""
        (pixels,) = cast(torch.Tensor, inputs["pixel_values"])
        return cast(torch.Tensor, pixels)


def _lengthened(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Returns rows followed by zeros, `count` in all."""
    return torch.cat([rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))])
