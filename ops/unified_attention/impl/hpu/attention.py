"""Unified Attention for Gaudi: a few batched matrix products with a softmax between them, nothing read on the host.

A graph is small whatever its sizes: a part is one product, or a handful over chunks of rows, and tiling for the chip's
memory is the graph compiler's work. A step that does not fit in the card's memory (`score_memory`) is divided. Runs on
any device. It computes what the reference defines, except for keys with an infinite element: these are not detected,
and a score of -Inf has weight 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.hpu import kernels as hpu_kernels
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.blocks import Blocks, attend_blocks, blocks_of
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.fused import fused_causal
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.products import Products, Seen, write
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.rows import attend_rows, hidden_tokens, token_distances
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.tiles import TileWindow, attend_tiles, window_of
from vllm_gaudi_ucm.ops.unified_attention.implementation import AttentionImplementation
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart, SharedPart
from vllm_gaudi_ucm.ops.unified_attention.score_memory import CHUNKS_BESIDE_TILES, MOST_CHUNKS
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead


class HpuPlan(NamedTuple):
    """Data that the layers of a step share: masks and indices, made once.

    causal, shared: the parts; None if they have no rows or blocks.
    hidden: bool [rows, tokens] of shared blocks and, unless there are tiles, of new tokens; see `hidden_tokens`.
    window: of the causal part's tiles; None: its slices are used.
    blocks: the blocks of the unique and the selected part.
    distances: fp32 [rows, tokens] of the tokens of `hidden`, for layers with slopes; see `token_distances`.
    """

    causal: CausalPart | None
    shared: SharedPart | None
    hidden: Tensor | None
    window: TileWindow | None
    blocks: tuple[Blocks, ...]
    distances: Tensor | None = None


class HpuAttention(AttentionImplementation):
    """Unified Attention for Gaudi; runs on any device if chosen by name."""

    devices = frozenset({"hpu"})
    priority = 20
    gives_log_sums = True

    def supports(self, spec: AttentionSpec) -> bool:
        return not spec.both_ways

    def unavailable(self, device: str) -> str | None:
        return None

    def plan(self, parts: AttentionParts, block_size: int) -> HpuPlan:
        """Reads nothing on the host, so it may be part of a graph; a server makes it once for each step."""
        causal = None if parts.causal is None or parts.causal.groups.shape[0] == 0 else parts.causal
        shared = None if parts.shared is None or parts.shared.blocks.shape[0] == 0 else parts.shared
        of_blocks = shared or parts.unique or parts.selected
        token = None if of_blocks is None else torch.arange(block_size, device=of_blocks.hi.device)
        positions = parts.positions
        blocks = blocks_of(parts.unique, parts.selected, token, positions)
        # with chosen blocks, slices keep the graph small: choosing them needs as many operators again. Tiles have no
        # distances
        slices = parts.selected is not None or positions is not None
        tiles = None if causal is None or slices else causal.tiles
        in_rows = causal if tiles is None else None
        window = None if causal is None or tiles is None else window_of(causal.groups, tiles, causal.first_rows)
        hidden = hidden_tokens(shared, in_rows, token)
        far = None if positions is None else token_distances(shared, in_rows, token, positions)
        return HpuPlan(causal, shared, hidden, window, blocks, far)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: HpuPlan,
        spec: AttentionSpec,
        out: Tensor,
        selected_blocks: Tensor | None = None,
        per_head: PerHead = NOTHING_PER_HEAD,
        log_sums: Tensor | None = None,
    ) -> bool:
        """Like the interface. Always True: no tensors need the reference."""
        num_rows, kv_heads = query.shape[0], key.shape[1]
        if num_rows == 0:
            return True
        causal, hidden, window = plan.causal, plan.hidden, plan.window
        fused = hpu_kernels.FUSED_SDPA
        alone = causal is not None and plan.shared is None and len(plan.blocks) == 0
        plain = spec.logits_soft_cap is None and not (spec.has_sinks or spec.has_slopes) and log_sums is None
        if fused is not None and alone and plain and query.dtype == torch.bfloat16:
            mask = hidden if window is None else window
            assert causal is not None, "new tokens alone"
            assert mask is not None, "new tokens are hidden from some rows"
            fused_causal(query, key, value, causal, mask, spec.scale, out, fused)
            return True

        products = Products.from_query(query, key_cache, spec, per_head.slopes)
        rows = products.query(query, kv_heads)
        seen: Seen | None = None
        if hidden is not None:
            in_chunks = causal if window is None else None
            most = MOST_CHUNKS if in_chunks is not None else CHUNKS_BESIDE_TILES if causal is not None else 1
            tensors = (rows, key, value, key_cache, value_cache)
            seen = attend_rows(*tensors, plan.shared, in_chunks, hidden, products, most, plan.distances)
        if window is not None:
            assert causal is not None, "a window is that of new tokens"
            assert causal.tiles is not None, "a window is that of tiles"
            seen = attend_tiles(rows, key, value, causal.tiles, window, products, seen)
        for one in plan.blocks:
            seen = attend_blocks(rows, key_cache, value_cache, one, selected_blocks, products, seen)
        write(seen, out, per_head.sinks, log_sums)
        return True
