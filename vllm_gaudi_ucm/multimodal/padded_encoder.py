"""Encodes pictures of any size at few sizes, so that a device compiles nothing once these are warm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_ucm.graphs.shapes.picture_sizes import sizes_up_to

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.grid_encoder import GridEncoder


class PaddedEmbeddings(NamedTuple):
    """The embeddings of a picture, [tokens of a size, width]; pads follow the first `own`."""

    embeddings: torch.Tensor
    own: int


class PaddedEncoder:
    """Pads pictures to sizes, each twice the one before.

    Args:
        encoder: takes pads.
        longest: embeddings of the largest picture.

    sizes: tokens, ascending.
    """

    def __init__(self, encoder: GridEncoder, longest: int, device: torch.device) -> None:
        self._encoder = encoder
        self._device = device
        self.sizes = sizes_up_to(longest)

    def encode(self, inputs: Mapping[str, object]) -> PaddedEmbeddings | None:
        """Returns the embeddings of one picture; None if it is larger than all sizes.

        inputs: as its processor has made them, on the host.
        """
        patches, grids = inputs["pixel_values"], inputs["image_grid_thw"]
        assert isinstance(patches, torch.Tensor), "pictures are patches in one tensor"
        assert isinstance(grids, torch.Tensor), "grids are a tensor"
        return self._padded(patches, grids.reshape(-1).tolist())

    def warm_up(self) -> Iterator[PaddedEmbeddings]:
        """Encodes a picture of zeros at each size, the largest first."""
        for size in reversed(self.sizes):
            found = self._padded(*self._encoder.empty(size))
            assert found is not None, "a size is its own"
            yield found

    def _padded(self, patches: torch.Tensor, grid: list[int]) -> PaddedEmbeddings | None:
        count = len(patches) // self._encoder.side**2
        size = next((size for size in self.sizes if size >= count), None)
        if size is None:
            return None
        return PaddedEmbeddings(self._encoder.run(self._encoder.padded(patches, grid, size), self._device), count)
