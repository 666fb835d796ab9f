"""The row input of pictures whose rows see each other: which rows of a step are in the same picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.row_input import RowInput

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.vllm_api.steps import NewRequestData

T = TypeVar("T")

SPANS = "picture_spans"
"""The attribute of a model whose attention reads them."""


class PictureSpans(RowInput):
    """The number of each row's picture in a step, 0 for a token of text. Neighbouring embeddings are a picture; tokens
    between them, such as ends of rows, are text.

    Attention layers read the tensor, not the arguments of the model's forward.

    kept: int32 [table rows, longest request], the number of each position's picture in its prompt.
    """

    name = SPANS

    @classmethod
    def kept_shape(cls, max_model_len: int) -> tuple[int, ...]:
        return (max_model_len,)

    @classmethod
    def is_read_by(cls, model: nn.Module) -> bool:
        """Returns whether rows of the model see both ways inside of a picture."""
        return SPANS in vars(model)

    @classmethod
    def kwargs(cls, values: T) -> dict[str, T]:
        return {}

    def add(self, row: int, new: NewRequestData) -> None:
        self.kept[row] = 0
        spans = (span for feature in new.mm_features or () for span in feature.mm_position.extract_embeds_range())
        for number, (first, last) in enumerate(spans, 1):
            self.kept[row, first : last + 1] = number

    def of(self, plan: UnifiedPlan) -> NDArray[np.integer[Any]]:
        numbers = self.kept[plan.table_rows[plan.row_requests], plan.positions].astype(np.int64)
        # of each request its own
        return np.where(numbers > 0, numbers + plan.row_requests * (self.kept.shape[1] + 1), 0)
