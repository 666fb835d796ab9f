"""Joins the blocks selected for rows and the other blocks that they see into one list for each row or request: one
launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.selected_list import SelectedList
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import CudaPlan, Lists, sort_by_owner
from vllm_gaudi_ucm.ops.unified_attention.parts import SelectedPart, UniquePart


class Joined(NamedTuple):
    """Lists that include the blocks chosen for their rows: one launch, whose programs share all entries evenly.

    lists: by row, or by span of the selected part; see Lists for their blocks. chosen: the entries of the selected
        part, written by each layer.
    """

    lists: Lists
    chosen: SelectedList

    def blocks_with(self, selected: Tensor) -> Tensor:
        """Int64 [entries] with `blocks` as the selected part, unless a choice has already written them there."""
        chosen = self.chosen
        if chosen.holds is not selected:
            chosen.blocks.index_copy_(0, chosen.places, selected)
            # the caller may change its blocks until the next layer
            chosen.written(None)
        return chosen.blocks


def joined_lists(plan: CudaPlan, rows: int) -> Joined:
    """Returns the lists of a plan that joins its parts, for layers with this many rows."""
    unique, selected = plan.parts.unique, plan.parts.selected
    assert unique is not None, "joined"
    assert selected is not None, "joined"
    return plan.kept(("joined", rows), lambda: join(unique, selected, plan.block_size, rows))


def join(unique: UniquePart, selected: SelectedPart, block_size: int, rows: int) -> Joined:
    """Makes a list for each of the step's rows: its unique blocks, then the blocks chosen for it."""
    chosen_seen = (selected.hi > 0) & (selected.num_rows > 0)[selected.spans]
    slice_ = torch.arange(unique.rows.shape[0], device=unique.rows.device)
    return sorted_by_owner(
        torch.cat((unique.rows, selected.first_rows[selected.spans])),
        torch.cat((unique.hi.clamp(max=block_size) > unique.lo.clamp(min=0), chosen_seen)),
        rows,
        torch.cat((slice_ if unique.blocks is None else unique.blocks, selected.blocks)),
        torch.cat((unique.lo, torch.zeros_like(selected.hi))).int(),
        torch.cat((unique.hi, selected.hi)).int(),
        slice(unique.rows.shape[0], None),
    )


def sorted_by_owner(
    owners: Tensor, seen: Tensor, count: int, blocks: Tensor, lo: Tensor, hi: Tensor, chosen: slice
) -> Joined:
    """Sorts the entries of this many lists by their owners. chosen: the entries of the selected part."""
    order, by_owner, offsets = sort_by_owner(owners, seen, count)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    blocks = blocks[order]
    lists = Lists(order, blocks, lo[order], hi[order], by_owner, offsets)
    return Joined(lists, SelectedList(blocks, place[chosen].contiguous()))
