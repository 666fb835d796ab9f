"""The interface of an implementation of attention over chosen tokens, and the registry of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.ops.registry import Implementation, Implementations

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts


class IndexRows(NamedTuple):
    """The results of a layer's indexer for each row.

    query: [rows, heads, dim]. key: [rows, dim], of the row as a token. weights: float32 [rows, heads].
    """

    query: Tensor
    key: Tensor
    weights: Tensor


class TokenPlaces(NamedTuple):
    """The tokens that rows see, and the slots of these tokens.

    parts: shared, unique and causal parts. A unique part has `places` and `most_of_row`.
    slots: int64 [rows], slots of the rows as tokens.
    block_size: slots of a block.
    """

    parts: AttentionParts
    slots: Tensor
    block_size: int


class ChosenTokensImplementation(Implementation[None], ABC):
    """One way to choose tokens and to attend to them."""

    @abstractmethod
    def choose(self, index: IndexRows, keys: Tensor, places: TokenPlaces, count: int) -> Tensor:
        """Tensors as in `choose_tokens`, validated."""

    @abstractmethod
    def attend(self, query: Tensor, cache: Tensor, slots: Tensor, scale: float, value_size: int) -> Tensor:
        """Tensors as in `attend_tokens`, validated."""


CHOSEN_TOKENS: Implementations[ChosenTokensImplementation] = Implementations(
    "chosen_tokens",
    "vllm_gaudi_ucm.chosen_tokens_implementations",
    reference="vllm_gaudi_ucm.ops.chosen_tokens.impl.reference:ReferenceChosenTokens",
    tiled="vllm_gaudi_ucm.ops.chosen_tokens.impl.tiled:TiledChosenTokens",
    cuda="vllm_gaudi_ucm.ops.chosen_tokens.impl.cuda.chosen:CudaChosenTokens",
)
