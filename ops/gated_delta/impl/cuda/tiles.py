"""The gated delta rule for prompts on CUDA: one launch solves all tiles, and one walks through them.

The kernels are imported where they are launched, because triton is optional.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.cuda.state_tiles import Products, are_multiplied, block_of
from vllm_gaudi_ucm.ops.gated_delta.implementation import DeltaRows
from vllm_gaudi_ucm.ops.state_rows import NULL_SLOT, StateRows, rows_together

KEYS, VALUES, MOST_VALUES = (64, 128), 64, 256
COLUMNS, SOLVE_WARPS, WALK_WARPS, STAGES = 32, 4, 4, 2


def covers(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Returns whether the kernels compute rows of this dtype, in heads of these sizes.

    Models so far have these sizes. With keys of 5 or 40 elements, or one stage, Triton 3.6 makes machine code that
    reads shared memory beyond its end (H200), and two tiles of wider keys do not fit into it.
    """
    from triton import knobs

    fits = key_dim in KEYS and value_dim % VALUES == 0 and value_dim <= MOST_VALUES
    return are_multiplied(dtype) and (fits or bool(knobs.runtime.interpret))


def scan_prompts(rows: DeltaRows, states: Tensor, step: StateRows, found: Tensor, *, normalise: bool) -> None:
    """Computes the rows of tiles, and writes their results to `found`, [rows, heads, value_dim], contiguous.

    The kernels must cover their sizes.
    """
    from vllm_gaudi_ucm.ops.gated_delta.impl.cuda.triton import tiles as kernels

    (tiles, width), (_, heads, key_dim, value_dim) = step.tile_rows.shape, states.shape
    q, k, v = (rows_together(each) for each in (rows.q, rows.k, rows.v))
    products, device = Products.of_rows(), v.device
    row_block, many = block_of(width), tiles * heads
    u, w, of_queries = (
        torch.empty((many, row_block, columns), dtype=products.operand, device=device)
        for columns in (value_dim, key_dim, row_block)
    )
    factors = torch.empty((2, many, row_block), dtype=torch.float32, device=device)
    tile_decays = torch.empty(many, dtype=torch.float32, device=device)
    made = (u, w, of_queries, factors[0], factors[1], tile_decays)
    sizes = {
        "HEADS": heads,
        "REPEATS": heads // k.shape[1],
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "WIDTH": width,
        "KEYS": block_of(key_dim),
        "ROWS": row_block,
        "PRECISION": products.precision,
    }
    kernels.solve_tiles[(many,)](
        *(q, k, v, rows.log_decay.float().contiguous(), rows.beta.float().contiguous()),
        *(step.tile_rows, step.tile_sources, *made),
        *(key_dim**-0.5, q.stride(0), k.stride(0), v.stride(0)),
        NORMALISE=normalise,
        VALUES=block_of(value_dim),
        LEVELS=row_block.bit_length() - 1,
        INVERSE=products.inverse,
        num_warps=SOLVE_WARPS,
        **sizes,
    )
    columns = min(COLUMNS, block_of(value_dim))
    kernels.walk_deltas[(heads * -(-value_dim // columns), tiles)](
        *(q, k, *made, states, found, step.tile_rows, step.tile_sources, step.tile_targets),
        *(tiles, q.stride(0), k.stride(0)),
        VALUES=columns,
        TILES=1 << (tiles - 1).bit_length(),
        STAGES=STAGES if products.operand.itemsize < 4 else 1,
        NULL=NULL_SLOT,
        num_warps=WALK_WARPS,
        **sizes,
    )
