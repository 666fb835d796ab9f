"""Encoders of pictures as tiles of one size (InternVL): `vllm.model_executor.models.interns1` and `internvl`.

Internal: `extract_feature`, `num_image_token` and the encoder of such a model.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

__all__ = ["TileEncoder"]

_INPUTS = ("pixel_values", "pixel_values_videos", "pixel_values_flat", "pixel_values_flat_video")
_ENCODERS = ("vision_tower", "vision_model")


class TileEncoder:
    """Runs an encoder on the tiles of a picture, or the frames of a video, and on tiles of zeros behind them, which
    nothing reads.

    Reason: the model has a shape for each number of tiles.
    Remove when: it implements `SupportsEncoderCudaGraph`, which pads the number.

    unit: tokens of a tile; sizes are multiples of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = cast(Any, model)
        encoder = next(getattr(model, name) for name in _ENCODERS if hasattr(model, name))
        self._dtype = next(encoder.parameters()).dtype
        self.unit: int = self._model.num_image_token

    @classmethod
    def of(cls, model: nn.Module) -> "TileEncoder | None":
        """Returns the encoder of a model; None if it has another kind of encoder."""
        tiled = all(hasattr(model, name) for name in ("extract_feature", "num_image_token"))
        return cls(model) if tiled and any(hasattr(model, name) for name in _ENCODERS) else None

    def count(self, inputs: Mapping[str, object]) -> int:
        """Returns the tokens of a picture or a video."""
        return len(_tiles(inputs)) * self.unit

    def empty(self, tokens: int) -> Mapping[str, object]:
        """Returns the inputs of a picture of zeros, on the host."""
        size = self._model.config.vision_config.image_size
        # vLLM reads every picture in three colours
        shape = (tokens // self.unit, 3, *((size, size) if isinstance(size, int) else size))
        return {"pixel_values": torch.zeros(shape, dtype=self._dtype)}

    def padded(self, inputs: Mapping[str, object], tokens: int) -> dict[str, torch.Tensor]:
        """Returns what `run` takes, on the host. tokens: of the result."""
        tiles = _tiles(inputs).to(self._dtype)
        pads = tiles.new_zeros((tokens // self.unit - len(tiles), *tiles.shape[1:]))
        return {"pixel_values": torch.cat([tiles, pads])}

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the embeddings [tokens, width]; the picture's are first. inputs: on the device."""
        found: torch.Tensor = self._model.extract_feature(inputs["pixel_values"]).flatten(0, 1)
        return found


def _tiles(inputs: Mapping[str, object]) -> torch.Tensor:
    """Returns [tiles, channels, height, width] of the one picture or video."""
    return cast(torch.Tensor, next(inputs[name] for name in _INPUTS if name in inputs))
