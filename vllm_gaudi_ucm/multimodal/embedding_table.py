"""Embeddings that are no token's, such as those of pictures: one tensor on the device, from which steps take rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler


TABLE = "embedding_table"
"""The attribute of a model that reads pictures."""


class TableFullError(RuntimeError):
    """An item has more embeddings than the table has free rows."""


class EmbeddingTable:
    """Keeps the embeddings of items by key. An item takes any free rows, so the table has no gaps.

    A step reads rows by an index tensor (`EmbeddingRows`). Its first row is never written; rows of tokens and pads of
    a bucket refer to it. All shapes depend only on the number of the step's rows, so a graph has one form.

    Args:
        num_rows: embeddings that it holds.
        width: size of an embedding.
    """

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        # the last row is for pads
        self.values = torch.zeros((2 + num_rows, width), dtype=dtype, device=device)
        self._rows: dict[str, NDArray[np.int32]] = {}
        self._free = list(range(num_rows, 0, -1))
        self._mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _of_tokens
        self._choose: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _chosen

    def give_to(self, model: nn.Module) -> None:
        """Makes a model take embeddings from this table: `EmbeddingRows` and `Decoder` look for the attribute."""
        # not a module
        vars(model)[TABLE] = self

    @property
    def num_rows(self) -> int:
        return len(self.values) - 2

    @property
    def num_free(self) -> int:
        return len(self._free)

    def compile(self, compiler: StaticCompiler) -> None:
        """Makes the two computations of a step compiled regions from now on."""
        self._mask, self._choose = compiler.region(_of_tokens), compiler.region(_chosen)

    def rows_of(self, key: str) -> NDArray[np.int32] | None:
        """Returns int32 [embeddings] the rows of an item; None if the table does not have it."""
        return self._rows.get(key)

    def put(self, key: str, embeddings: torch.Tensor, count: int | None = None) -> None:
        """Copies an item's embeddings, [embeddings, width], into free rows. Ignored if the table has the item.

        count: those from here on are pads, which take no rows; None: there are no pads.

        Raises:
            ValueError: they are not of this width.
            TableFullError: there are too few free rows.
        """
        count = len(embeddings) if count is None else count
        if key in self._rows:
            return
        if embeddings.shape[1:] != self.values.shape[1:]:
            raise ValueError(f"embeddings of shape {list(embeddings.shape)}, expected {self.values.shape[1]} columns")
        if count > len(self._free):
            raise TableFullError(f"{count} embeddings do not fit {len(self._free)} free rows of {self.num_rows}")
        rows = np.array([self._free.pop() for _ in range(count)], np.int32)
        places = np.full(len(embeddings), len(self.values) - 1, np.int64)
        places[:count] = rows
        self.values.index_copy_(0, torch.from_numpy(places).to(self.values.device), embeddings.to(self.values.dtype))
        self._rows[key] = rows

    def fill(self, embeddings: torch.Tensor) -> None:
        """Copies embeddings to the first rows, in one copy.

        embeddings: [rows, width], on the host, the first one zeros. Steps that read other rows must be queued, and no
        item may have rows.
        """
        assert not self._rows, "rows of items would be lost"
        self.values[: len(embeddings)].copy_(embeddings)

    def free(self, key: str) -> None:
        """Forgets an item if the table has it. Steps that read it must be queued."""
        rows = self._rows.pop(key, None)
        if rows is not None:
            self._free += rows.tolist()

    def clear(self) -> None:
        """Forgets all items."""
        for key in list(self._rows):
            self.free(key)

    def token_ids(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns int64 [rows] token ids, 0 for rows that the table describes: a placeholder may be no token of the
        vocabulary.
        """
        return self._mask(token_ids, rows)

    def merged(self, of_tokens: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the embeddings of a step's rows, the table's, or else the tokens'; and what the table has beyond the
        width of a token's, with zeros for rows of tokens.

        of_tokens: [rows, width of a token's].
        """
        return self._choose(of_tokens, self.values, rows)


def embedding_table_of(model: object) -> EmbeddingTable | None:
    """Returns the table that an `ItemEncoder` has given to a model; None if the model reads only tokens."""
    found: EmbeddingTable | None = vars(model).get(TABLE) if isinstance(model, nn.Module) else None
    return found


def _of_tokens(token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return token_ids * (rows == 0).to(token_ids.dtype)


def _chosen(
    of_tokens: torch.Tensor, values: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    found, width = values.index_select(0, rows), of_tokens.shape[1]
    merged = torch.where((rows == 0).unsqueeze(1), of_tokens, found[:, :width])
    return merged, found[:, width:] if found.shape[1] > width else None
