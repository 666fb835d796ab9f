"""vLLM's Triton kernel of experts as a peer, with torch's operators where vLLM calls compiled ones.

The empty-device build has the kernel, but not `moe_align_block_size`, `moe_sum` or the gates: ours replace the gate and
the sum. Pairs are grouped once, before the measured calls, so the figure is less than vLLM's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.moe.impl.cuda.experts import SUMMED
from vllm_gaudi_ucm.ops.moe.implementation import ExpertWeights
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.gate import cuda_gate


class VllmKernel:
    """Two launches of `fused_moe_kernel` by vLLM's default configuration, the gate, and the sum."""

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights
        self._aligned: tuple[int, Tensor, Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        from triton import language as tl
        from vllm.model_executor.layers.fused_moe.fused_moe import get_default_config, invoke_fused_moe_triton_kernel

        from vllm_gaudi_ucm.ops.moe.impl.cuda.triton.sums import sum_pairs

        (rows, chosen), (experts, double, hidden) = ids.shape, self._weights.w13.shape
        config: dict[str, Any] = get_default_config(rows, experts, double // 2, hidden, chosen, None)
        tile = config["BLOCK_SIZE_M"]
        order, of_tile, count = self._align(ids, experts, tile)
        both, found = x.new_empty(rows, chosen, double), x.new_empty(rows, chosen, hidden)
        how: dict[str, Any] = {
            "config": config,
            "compute_type": {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(x.dtype, tl.float32),
            "use_fp8_w8a8": False,
            "use_int8_w8a8": False,
            "use_int8_w8a16": False,
            "use_int4_w4a16": False,
            "per_channel_quant": False,
        }
        aligned = (order, of_tile, count)
        invoke_fused_moe_triton_kernel(x, self._weights.w13, both, None, None, None, *aligned, False, chosen, **how)
        inner = cuda_gate(both.view(-1, double))
        invoke_fused_moe_triton_kernel(inner, self._weights.w2, found, None, None, shares, *aligned, True, 1, **how)
        out = torch.empty_like(x)
        pieces = -(-hidden // SUMMED)
        sum_pairs[(rows * pieces,)](found, ids, out, hidden, CHOSEN=chosen, EXPERTS=experts, BLOCK=SUMMED)
        return out

    def _align(self, ids: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs of each expert, padded to tiles by the number behind the last; the expert of each tile; pairs."""
        if self._aligned is not None and self._aligned[0] == tile:
            return self._aligned[1:]
        flat = ids.flatten()
        tiles = [(flat == number).nonzero().flatten().split(tile) for number in range(experts)]
        padded, of_tile = [], []
        for number, parts in enumerate(tiles):
            for part in parts:
                if len(part):
                    padded.append(torch.nn.functional.pad(part, (0, tile - len(part)), value=len(flat)))
                    of_tile.append(number)
        order = torch.cat(padded).to(torch.int32)
        found = order, torch.tensor(of_tile, dtype=torch.int32, device=ids.device)
        count = torch.tensor([len(order)], dtype=torch.int32, device=ids.device)
        self._aligned = (tile, *found, count)
        return self._aligned[1:]
