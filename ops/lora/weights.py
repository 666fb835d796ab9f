"""The weights of all adapters of a layer, each in a slot, in the layout that the products read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_ADAPTER = -1
"""The slot of a row without an adapter."""


@dataclass(frozen=True)
class AdapterWeights:
    """Weights of the adapters of one layer. A slot without an adapter is zeros, and so is what a smaller rank leaves.

    A layer may compute several results at once, such as query, key and value; each is a slice of its output with
    matrices of its own.

    down: [slices * slots * rank, inputs], the matrices A: every slot of the first slice, then of the second. In an
        embedding it is [slots * tokens, rank], a row for each token, without slices.
    up: [outputs, slots * rank], the matrices B: each slice has its rows of it.
    slots: number of adapters.
    outputs: outputs of each slice.
    joined: [outputs + slices * slots * rank, inputs], the layer's own weight and `down` in one tensor, so that one
        product computes both; None if they are apart.
    """

    down: Tensor
    up: Tensor
    slots: int
    outputs: tuple[int, ...]
    joined: Tensor | None = None

    @classmethod
    def zeros(
        cls, inputs: int, outputs: Sequence[int], slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> AdapterWeights:
        """Allocates a layer without adapters."""
        down = torch.zeros(len(outputs) * slots * rank, inputs, dtype=dtype, device=device)
        up = torch.zeros(sum(outputs), slots * rank, dtype=dtype, device=device)
        return cls(down, up, slots, tuple(outputs))

    @classmethod
    def joined_with(cls, own: Tensor, outputs: Sequence[int], slots: int, rank: int) -> AdapterWeights:
        """Allocates a layer without adapters, with a copy of its own weight in `joined`. own: [outputs, inputs]."""
        joined = own.new_zeros(len(own) + len(outputs) * slots * rank, own.shape[1])
        joined[: len(own)].copy_(own)
        up = own.new_zeros(len(own), slots * rank)
        return cls(joined[len(own) :], up, slots, tuple(outputs), joined)

    @property
    def own(self) -> Tensor:
        """Returns the layer's own weight, a view of `joined`, which must not be None."""
        assert self.joined is not None, "the layer's own weight is apart"
        return self.joined[: len(self.up)]

    def on_host(self) -> AdapterWeights:
        """Returns a copy in host memory, in the same layout, to be written there and copied back as a whole."""
        return AdapterWeights(self.down.cpu(), self.up.cpu(), self.slots, self.outputs)

    def copy_from(self, written: AdapterWeights) -> None:
        """Copies all slots of another object of this layout."""
        self.down.copy_(written.down)
        self.up.copy_(written.up)

    @property
    def rank(self) -> int:
        return self.up.shape[1] // self.slots

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the weights, whether slots are in use or not."""
        return self.down.nbytes + self.up.nbytes

    def down_of_slices(self) -> tuple[Tensor, ...]:
        """Returns views [slots, 1, rank, inputs] of each slice, through which adapters are written."""
        return self.down.view(len(self.outputs), self.slots, 1, self.rank, -1).unbind(0)

    def up_of_slices(self) -> tuple[Tensor, ...]:
        """Returns views [slots, 1, outputs, rank] of each slice, through which adapters are written."""
        pieces = self.up.view(len(self.up), self.slots, 1, self.rank).split(self.outputs)
        return tuple(piece.permute(1, 2, 0, 3) for piece in pieces)
