"""States of tiles on CUDA: one launch in place of some for each tile.

The kernel is imported where it is launched, because triton is optional.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.state_rows import StateRows
from vllm_gaudi_ucm.ops.state_tiles import TileChange, carry_states

MOST_ROWS = 256
"""Rows of a state that a program multiplies: it keeps them in registers."""
COLUMNS, PART, WARPS = 32, 32, 8


def carry_on_cuda(step: StateRows, states: Tensor, change: TileChange) -> Tensor:
    """See `carry_states`; states with more rows, or in float64, take torch's operators."""
    from vllm_gaudi_ucm.ops.cuda.triton.state_tiles import carry_tiles

    tiles, heads, rows, columns = change.added.shape
    if change.added.dtype != torch.float32 or (change.replaced is not None and rows > MOST_ROWS):
        return carry_states(step, states, change)
    added, decay = change.added.contiguous(), change.decay.contiguous()
    replaced = added if change.replaced is None else change.replaced.contiguous()
    loaded = states.index_select(0, step.tile_sources.clamp(min=0))
    before = torch.empty_like(added)
    # tl.dot takes no fewer than 16
    row_block = max(1 << (rows - 1).bit_length(), 16)
    row_block = min(row_block, COLUMNS) if change.replaced is None else row_block
    column_block = min(max(1 << (columns - 1).bit_length(), 16), COLUMNS)
    carry_tiles[(heads * -(-rows // row_block) * -(-columns // column_block),)](
        *(loaded, added, decay, replaced, before, states, step.tile_sources, step.tile_targets, tiles),
        HEADS=heads,
        ROWS=rows,
        COLUMNS=columns,
        REPLACES=change.replaced is not None,
        ROW_BLOCK=row_block,
        COLUMN_BLOCK=column_block,
        PART=PART,
        num_warps=WARPS if change.replaced is not None else WARPS // 2,
    )
    return before
