"""The unique and the selected part of single rows as one list for each row, which one launch attends to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import Lists, sort_by_owner
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart, UniquePart


class Joined(NamedTuple):
    """The lists of single rows, with what is chosen for them: one launch, whose programs share both evenly.

    lists: by row. blocks: int64 [entries], see Lists; those of the selected part are written by each layer.
    places: int64 [selected] where they are.
    """

    lists: Lists
    blocks: Tensor
    places: Tensor


def join(unique: UniquePart, selected: SelectedPart, block_size: int, rows: int) -> Joined:
    """A list for each of the step's rows: its unique blocks, then those chosen for it."""
    chosen_lo = torch.zeros_like(selected.hi)
    seen = torch.cat(
        (
            unique.hi.clamp(max=block_size) > unique.lo.clamp(min=0),
            (selected.hi > 0) & (selected.num_rows > 0)[selected.spans],
        )
    )
    owners = torch.cat((unique.rows, selected.first_rows[selected.spans]))
    order, by_row, offsets = sort_by_owner(owners, seen, rows)
    slice_ = torch.arange(unique.rows.shape[0], device=order.device)
    blocks = torch.cat((slice_ if unique.blocks is None else unique.blocks, selected.blocks))[order]
    lo, hi = torch.cat((unique.lo, chosen_lo)).int()[order], torch.cat((unique.hi, selected.hi)).int()[order]
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    lists = Lists(order, blocks, lo, hi, by_row, offsets)
    return Joined(lists, blocks, place[unique.rows.shape[0] :].contiguous())
