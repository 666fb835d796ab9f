"""Inputs that a model's forward reads for each row of a step: token ids, positions, and inputs from other packages."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_gaudi_ucm.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_ucm.batch.batch_plan import UnifiedPlan
    from vllm_gaudi_ucm.vllm_api.steps import NewRequestData

T = TypeVar("T")


class RowInput:
    """One integer or several for each row of a step. By default, a number per request, the same for all of its rows.

    A subclass in `ROW_INPUTS` is supported at true shapes, padded to buckets, in every stage of a pipeline, and for
    rows that verify drafts. The request table makes one object of it, which keeps numbers of the live requests.

    Prefix caching does not take row inputs into account. If a number changes the keys and values of a row, requests
    with different numbers need different values of `cache_salt`, which stores and other KV connectors also take into
    account. Without a KV connector, `--no-enable-prefix-caching` is another way.

    name: a Python identifier. The model's forward has an argument of this name, unless `kwargs` returns another name.
    dtype: dtype of the tensor at true shapes. In a bucket all tensors are int64, because they are pieces of one.
    columns: numbers of each row, so that arrays are [columns, rows]; if None, one number, and arrays are [rows].
    pad: the number of rows that belong to no request.

    Args:
        num_rows: rows of the request table to begin with.
        max_model_len: tokens of the longest request.
    """

    name: ClassVar[str]
    dtype: ClassVar[type[np.integer[Any]]] = np.int64
    columns: ClassVar[int | None] = None
    pad: ClassVar[int] = 0

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.kept: NDArray[np.int32] = np.zeros((num_rows, *self.kept_shape(max_model_len)), np.int32)

    @classmethod
    def kept_shape(cls, max_model_len: int) -> tuple[int, ...]:
        """Returns the shape of the entry in `kept` for one request."""
        return ()

    @classmethod
    def shape(cls, num_rows: int) -> tuple[int, ...]:
        return (num_rows,) if cls.columns is None else (cls.columns, num_rows)

    @classmethod
    def is_read_by(cls, model: nn.Module) -> bool:
        """Returns whether the forward of this model, which may be a draft model, takes the input."""
        return True

    def add(self, row: int, new: NewRequestData) -> None:
        """Keeps the numbers of a request in its row of the request table.

        vLLM sends a request again after a preemption or with the next input of a session; then its row may be the same.
        """

    def remove(self, row: int) -> None:
        """Forgets a request; its row may be given to another one."""
        self.kept[row] = 0

    def grow(self, num_rows: int) -> None:
        """Makes room for more rows of the request table."""
        more = np.zeros((num_rows - len(self.kept), *self.kept.shape[1:]), self.kept.dtype)
        self.kept = np.concatenate([self.kept, more])

    def of(self, plan: UnifiedPlan) -> NDArray[np.integer[Any]]:
        """Returns the numbers of a planned step: [rows], or [columns, rows]."""
        return self.kept[plan.table_rows[plan.row_requests]]

    @classmethod
    def kwargs(cls, values: T) -> dict[str, T]:
        """Returns the arguments of the model's forward that are made from the tensor.

        If two inputs give the same argument, the later one applies, so `positions` can be replaced.
        """
        return {cls.name: values}


class TokenIds(RowInput):
    """Token ids. -1 - s stands for the token in the sampler's slot s of the previous step, known only to the device.

    kept: int32 [table rows, longest request].
    """

    name = "token_ids"

    @classmethod
    def kept_shape(cls, max_model_len: int) -> tuple[int, ...]:
        return (max_model_len,)

    def add(self, row: int, new: NewRequestData) -> None:
        from vllm_gaudi_ucm.vllm_api.steps import prompt_tokens

        tokens = new.prefill_token_ids if new.prefill_token_ids is not None else prompt_tokens(new)
        self.kept[row, : len(tokens)] = tokens

    def of(self, plan: UnifiedPlan) -> NDArray[np.integer[Any]]:
        return self.kept[plan.table_rows[plan.row_requests], plan.positions]

    @classmethod
    def kwargs(cls, values: T) -> dict[str, T]:
        return {"input_ids": values}


class Positions(RowInput):
    """Positions of rows in their sequences."""

    name = "positions"

    @classmethod
    def kept_shape(cls, max_model_len: int) -> tuple[int, ...]:
        return (0,)

    def of(self, plan: UnifiedPlan) -> NDArray[np.integer[Any]]:
        return plan.positions


class TokenTypes(RowInput):
    """Token types of a pair of texts: 0, and 1 for the tokens of the second text. Encoders that score pairs read them.

    kept: int32 [table rows, 2], the tokens of type 1, from the first one to before the second one.
    """

    name = "token_types"

    @classmethod
    def kept_shape(cls, max_model_len: int) -> tuple[int, ...]:
        return (2,)

    @classmethod
    def is_read_by(cls, model: nn.Module) -> bool:
        return "token_type_ids" in inspect.signature(model.forward).parameters

    def add(self, row: int, new: NewRequestData) -> None:
        from vllm_gaudi_ucm.vllm_api.steps import token_types

        self.kept[row] = token_types(new)

    def of(self, plan: UnifiedPlan) -> NDArray[np.integer[Any]]:
        bounds = self.kept[plan.table_rows[plan.row_requests]]
        return ((plan.positions >= bounds[:, 0]) & (plan.positions < bounds[:, 1])).astype(np.int64)

    @classmethod
    def kwargs(cls, values: T) -> dict[str, T]:
        return {"token_type_ids": values}


RowInputs = Sequence[type[RowInput]]

BUILT_IN_INPUTS: RowInputs = (TokenIds, Positions)
"""Every model reads these."""

ROW_INPUTS: Registry[type[RowInput]] = Registry(
    "row input",
    "vllm_gaudi_ucm.row_inputs",
    token_ids=TokenIds,
    positions=Positions,
    token_types=TokenTypes,
    mrope_positions="vllm_gaudi_ucm.batch.mrope_positions:MropePositions",
    adapter_slots="vllm_gaudi_ucm.batch.adapter_slots:AdapterSlots",
    picture_spans="vllm_gaudi_ucm.batch.picture_spans:PictureSpans",
    embedding_rows="vllm_gaudi_ucm.batch.embedding_rows:EmbeddingRows",
    hidden_places="vllm_gaudi_ucm.batch.hidden_places:HiddenPlaces",
)


def inputs_of(model: nn.Module) -> tuple[type[RowInput], ...]:
    """Returns the registered inputs that a model reads.

    Raises:
        ValueError: the model's forward takes no such argument, or a name is no identifier.
    """
    found = [ROW_INPUTS.get(name) for name in ROW_INPUTS.names()]
    found = [kind for kind in found if kind.is_read_by(model)]
    for kind in found:
        if kind not in BUILT_IN_INPUTS:
            _check(kind, model)
    return tuple(found)


def _check(kind: type[RowInput], model: nn.Module) -> None:
    if not kind.name.isidentifier():
        raise ValueError(f"row input {kind.__qualname__}: found the name {kind.name!r}, expected a Python identifier")
    taken = inspect.signature(model.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        return
    missing = [name for name in kind.kwargs(None) if name not in taken]
    if missing:
        raise ValueError(
            f"row input {kind.name!r}: found no argument {', '.join(missing)} of {type(model).__name__}.forward, "
            f"expected one; {kind.__qualname__}.is_read_by has to return False for models that do not read it"
        )
