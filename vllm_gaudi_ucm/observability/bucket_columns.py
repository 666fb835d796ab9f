"""The sizes of forward shapes as columns of a table; those that say nothing of any shape are left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.causal_tiles import ALL_TILES


class BucketColumns(NamedTuple):
    """names: of the columns, as `ForwardShape` calls them."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, shapes: Iterable[ForwardShape], selected: bool | None = None) -> BucketColumns:
        """selected: whether there is a sparse method; None: whether any shape has selected blocks."""
        listed = list(shapes)
        names = ["query_len", "shared_blocks", "unique_blocks"]
        if selected or (selected is None and any(shape.selected_blocks for shape in listed)):
            names.append("selected_blocks")
        if any(shape.causal_reach != ALL_TILES for shape in listed):
            names.append("causal_reach")
        return cls(tuple(names))

    @property
    def headings(self) -> list[str]:
        """One short word for each column."""
        return [name.removesuffix("_blocks").removesuffix("_len").removeprefix("causal_") for name in self.names]

    def cells(self, shape: ForwardShape) -> list[str]:
        """The sizes of one shape; a reach that is no bound is left empty."""
        sizes = (getattr(shape, name) for name in self.names)
        return ["" if size == ALL_TILES else f"{size:,}" for size in sizes]
