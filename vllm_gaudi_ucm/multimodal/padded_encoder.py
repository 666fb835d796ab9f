"""Encodes pictures of any size at few sizes, so that a device compiles nothing once these are warm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import nn

from vllm_gaudi_ucm.graphs.shapes.picture_sizes import sizes_up_to
from vllm_gaudi_ucm.vllm_api.grid_encoder import GridEncoder
from vllm_gaudi_ucm.vllm_api.patch_encoder import PatchEncoder
from vllm_gaudi_ucm.vllm_api.soft_token_encoder import SoftTokenEncoder
from vllm_gaudi_ucm.vllm_api.tile_encoder import TileEncoder

KINDS = (GridEncoder, PatchEncoder, SoftTokenEncoder, TileEncoder)


class SizedEncoder(Protocol):
    """An encoder that takes pads. Inputs of a picture are as its processor has made them, on the host."""

    @property
    def unit(self) -> int:
        """Returns the tokens that each size is a multiple of."""

    def count(self, inputs: Mapping[str, object]) -> int:
        """Returns the tokens of a picture."""

    def empty(self, tokens: int) -> Mapping[str, object]:
        """Returns the inputs of a picture of zeros."""

    def padded(self, inputs: Mapping[str, object], tokens: int) -> dict[str, torch.Tensor]:
        """Returns what `run` takes, on the host. Numbers without a dimension stay there."""

    def run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the embeddings [tokens, width]; the picture's are first."""


def replaces_encoder(encoder: SizedEncoder, device: torch.device) -> bool:
    """Returns whether an encoder takes the place of the model's, even if pictures keep their sizes."""
    # a Gaudi does not know how Mistral 3 merges the patches of a token
    return isinstance(encoder, SoftTokenEncoder) or (
        device.type == "hpu" and isinstance(encoder, PatchEncoder) and encoder.merges
    )


class PaddedEmbeddings(NamedTuple):
    """The embeddings of a picture, [tokens of a size, width]; pads follow the first `own`."""

    embeddings: torch.Tensor
    own: int


class PaddedEncoder:
    """Pads pictures to sizes, each about twice the one before.

    Args:
        longest: embeddings of the largest picture.
        exact: encode pictures at their own sizes; then the largest alone is warmed.

    sizes: tokens, ascending.
    """

    def __init__(self, encoder: SizedEncoder, longest: int, device: torch.device, *, exact: bool = False) -> None:
        self._encoder = encoder
        self._device = device
        self._exact = exact
        self.sizes = [longest] if exact else sizes_up_to(longest, encoder.unit)

    @classmethod
    def of(cls, model: nn.Module, longest: int, device: torch.device, *, pads: bool = True) -> PaddedEncoder | None:
        """Returns the padded encoder of a model; None if its encoder takes no pads.

        pads: if false, only for a model whose own encoder does not run on this device or others, and without pads.
        """
        encoder = next((found for kind in KINDS if (found := kind.of(model)) is not None), None)
        if encoder is None or not (pads or replaces_encoder(encoder, device)):
            return None
        return cls(encoder, longest, device, exact=not pads)

    def encode(self, inputs: Mapping[str, object]) -> PaddedEmbeddings | None:
        """Returns the embeddings of one picture; None if it is larger than all sizes, and the model's own encoder can
        take it.

        inputs: as its processor has made them, on the host.

        Raises:
            ValueError: it is larger than all sizes.
        """
        count = self._encoder.count(inputs)
        size = next((count if self._exact else size for size in self.sizes if size >= count), None)
        if size is None and replaces_encoder(self._encoder, self._device):
            raise ValueError(
                f"it has {count} tokens, expected at most {self.sizes[-1]}; start the server with the largest number "
                "in --mm-processor-kwargs"
            )
        return None if size is None else PaddedEmbeddings(self._run(inputs, size), count)

    def warm_up(self) -> Iterator[PaddedEmbeddings]:
        """Encodes a picture of zeros at each size, the largest first."""
        for size in reversed(self.sizes):
            yield PaddedEmbeddings(self._run(self._encoder.empty(size), size), size)

    def _run(self, inputs: Mapping[str, object], size: int) -> torch.Tensor:
        padded = self._encoder.padded(inputs, size)
        # the longest sequences are numbers of the host
        return self._encoder.run(
            {name: tensor.to(self._device) if tensor.dim() else tensor for name, tensor in padded.items()}
        )
