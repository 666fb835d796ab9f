"""The row input of embeddings: the row of the embedding table that takes the place of a token's embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.row_input import RowInput

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.vllm_api.multimodal import MultiModalFeatureSpec
    from vllm_gaudi_ucm.vllm_api.steps import NewRequestData

T = TypeVar("T")

OF_TOKEN = 0
"""The table row of a row whose embedding is its token's, and of a pad. The table has zeros there."""


class PromptEmbeddings(NamedTuple):
    """Embeddings that a request has in its prompt.

    embeddings: [tokens of the prompt, width], on the host. is_embedding: bool [tokens of the prompt], false for tokens.
    """

    embeddings: torch.Tensor
    is_embedding: NDArray[np.bool_]

    def places(self, first: int, end: int) -> NDArray[np.int64]:
        """Returns int64 [n] the positions of embeddings from `first` to before `end`."""
        return first + np.flatnonzero(self.is_embedding[first:end])


class EmbeddingRows(RowInput):
    """Rows of the embedding table for the positions of a request that no token describes: a picture has some.

    The part of the worker that fills the table sets them before each step (`place`). The decoder reads the tensor, and
    gives the model embeddings in place of token ids.

    kept: int32 [table rows, longest request].
    """

    name = "embedding_rows"
    pad = OF_TOKEN

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        super().__init__(num_rows, max_model_len)
        self._features: dict[int, dict[int, MultiModalFeatureSpec]] = {}
        self._prompts: dict[int, PromptEmbeddings] = {}

    @classmethod
    def kept_shape(cls, max_model_len: int) -> tuple[int, ...]:
        return (max_model_len,)

    @classmethod
    def is_read_by(cls, model: nn.Module) -> bool:
        """Returns whether the model has a table of embeddings; a draft model has none."""
        return "embedding_table" in vars(model)

    @classmethod
    def kwargs(cls, values: T) -> dict[str, T]:
        return {}

    def add(self, row: int, new: NewRequestData) -> None:
        self.remove(row)
        if new.mm_features:
            self._features[row] = dict(enumerate(new.mm_features))
        if new.prompt_embeds is not None:
            of_tokens = new.prompt_is_token_ids or [False] * len(new.prompt_embeds)
            self._prompts[row] = PromptEmbeddings(new.prompt_embeds, ~np.array(of_tokens, bool))

    def remove(self, row: int) -> None:
        features, prompt = self._features.pop(row, None), self._prompts.pop(row, None)
        # a row without either has zeros
        if features is not None or prompt is not None:
            self.kept[row] = OF_TOKEN

    def prompt(self, row: int) -> PromptEmbeddings | None:
        """Returns the embeddings of a request's prompt, if it has any."""
        return self._prompts.get(row)

    def place_prompt(self, row: int, places: NDArray[np.int64], table_rows: NDArray[np.int32]) -> None:
        """Sets the table rows of some positions of a request. places: int64 [positions]; table_rows: int32, as many."""
        self.kept[row, places] = table_rows

    def features(self, row: int) -> dict[int, MultiModalFeatureSpec]:
        """Returns the items of a request by their number, in the order of their positions; they may be replaced."""
        return self._features.get(row, {})

    def needed(self, row: int, first: int, end: int) -> Iterator[MultiModalFeatureSpec]:
        """Yields the items of a request that have some of the positions from `first` to before `end`."""
        for feature in self.features(row).values():
            place = feature.mm_position
            if place.offset < end and place.offset + place.length > first:
                yield feature

    def place(self, row: int, feature: MultiModalFeatureSpec, table_rows: NDArray[np.int32]) -> None:
        """Sets the table rows of an item. table_rows: int32 [embeddings], as many as the item has."""
        place = feature.mm_position
        of_item = self.kept[row, place.offset : place.offset + place.length]
        if place.is_embed is None:
            of_item[...] = table_rows
        else:
            of_item[np.asarray(place.is_embed, bool)] = table_rows

    def of(self, plan: UnifiedPlan) -> NDArray[np.integer[Any]]:
        return self.kept[plan.table_rows[plan.row_requests], plan.positions]
