"""Sizes of the tensors of a step in a bucket."""

from collections.abc import Callable
from typing import NamedTuple

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import is_bounded, levels
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits


class Sizes(NamedTuple):
    """The values that determine sizes and pads in a bucket. choices: sizes of a sparse method's choices, if on."""

    shape: ForwardShape
    limits: Limits
    choices: SelectionLimits | None

    @property
    def spans(self) -> int:
        """Returns the number of requests, plus a last entry for rows without a request, which sees nothing."""
        return min(self.shape.query_len, self.limits.max_num_seqs) + 1


Size = Callable[[Sizes], tuple[int, ...] | None]
"""The shape of a tensor in a bucket; None if the bucket has no such tensor."""


def of_rows(sizes: Sizes) -> tuple[int, ...]:
    return (sizes.shape.query_len,)


def of_causal_rows(sizes: Sizes) -> tuple[int, ...] | None:
    return (sizes.shape.query_len,) if "c" in sizes.shape.phase else None


def of_tiles(sizes: Sizes) -> tuple[int, ...] | None:
    rows, most = sizes.shape.query_len, sizes.shape.max_prompt_tiles
    return (2, levels(rows, most)[0]) if is_bounded(rows, most) else None


def of_shared_blocks(sizes: Sizes) -> tuple[int, ...] | None:
    return (sizes.shape.shared_blocks,) if sizes.shape.shared_blocks else None


def of_first_tokens(sizes: Sizes) -> tuple[int, ...] | None:
    """Returns the size of the tensor of first tokens; None if requests use blocks from their first token on."""
    return of_shared_blocks(sizes) if sizes.limits.strip else None
