"""The contenders on a GPU: ours, vLLM's Triton kernel, torch SDPA. Each a call that writes its own result tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_cuda_case import Batch
from vllm_gaudi_ucm.batch.row_tiles import cut_rows
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import TILE_ROWS, is_bounded, levels
from vllm_gaudi_ucm.ops.unified_attention.api import prepare, unified_attention
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalTiles

SEGMENTS = 16
MOST_DECODES = 8  # rows of a request; more are a prompt, whose keys vLLM computes


class Side(NamedTuple):
    """A call; the tensor that the last one has written, in memory that a graph of the call keeps; that tensor as
    [rows, heads, dim]."""

    run: Callable[[], None]
    written: Callable[[], Tensor]
    rows: Callable[[], Tensor]


def ours(batch: Batch, implementation: str) -> Side:
    """Computes one layer, after the work done once per step."""
    ready = prepare(batch.parts, batch.model.block_size, implementation=implementation)
    out, spec = batch.out(), batch.model.spec

    def run() -> None:
        unified_attention(
            batch.query, batch.key, batch.value, *batch.caches, ready, spec, out, per_head=batch.per_head,
        )  # fmt: skip

    return Side(run, lambda: out, lambda: out)


def gaudi_form(batch: Batch, compiled: bool) -> Side:
    """The implementation for Gaudi on this GPU: its operators one by one, or fused by inductor.

    Prompts are in tiles if a bucket has them. Gaudi's own kernel for prompts alone is not available.
    """
    ready = prepare(_in_tiles(batch), batch.model.block_size, implementation="hpu")
    out, spec = torch.empty_like(batch.query), batch.model.spec

    def attend(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return unified_attention(query, key, value, keys, values, ready, spec, torch.empty_like(query))

    call = torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend

    def run() -> None:
        out.copy_(call(batch.query, batch.key, batch.value, *batch.caches))

    return Side(run, lambda: out, lambda: out)


def _in_tiles(batch: Batch) -> AttentionParts:
    """The parts of the batch, the causal one in tiles of rows if that bounds its work."""
    causal, rows = batch.parts.causal, batch.query.shape[0]
    begins = np.cumsum([0, *(request.new for request in batch.case.requests)])
    single = sum(request.new == 1 for request in batch.case.requests)
    cut = cut_rows(begins[single:].tolist())
    if causal is None or not is_bounded(rows, cut.reach):
        return batch.parts
    counts = levels(rows, cut.reach)
    first, last = (torch.from_numpy(place).to(batch.query.device) for place in cut.places(rows, counts[0]))
    return batch.parts._replace(causal=causal._replace(tiles=CausalTiles(first, last, TILE_ROWS, counts)))


def vllm_triton(batch: Batch, split: bool) -> Side | None:
    """vLLM's unified attention over the paged cache; split: its 3D kernel, for batches of decodes only."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention as peer
    except ImportError:
        return None
    requests, device = batch.case.requests, batch.query.device
    longest = max(request.new for request in requests)
    if split and longest > 1:
        return None
    new = torch.tensor([0] + [request.new for request in requests], device=device)
    lengths = torch.tensor([request.cached + request.new for request in requests], dtype=torch.int32, device=device)
    out = torch.empty_like(batch.query)
    rows, heads, dim = batch.query.shape
    room = {
        "softmax_segm_output": torch.empty(rows, heads, SEGMENTS, dim, device=device),
        "softmax_segm_max": torch.empty(rows, heads, SEGMENTS, device=device),
        "softmax_segm_expsum": torch.empty(rows, heads, SEGMENTS, device=device),
        "seq_threshold_3D": len(requests),
        "num_par_softmax_segments": SEGMENTS,
    }
    starts, most, model = new.cumsum(0).int(), int(lengths.max()), batch.model
    window = (model.window - 1, 0) if model.window else (-1, -1)

    def run() -> None:
        peer(
            q=batch.query, k=batch.caches[0], v=batch.caches[1], out=out, cu_seqlens_q=starts, max_seqlen_q=longest,
            seqused_k=lengths, max_seqlen_k=most, softmax_scale=model.spec.scale, causal=True, window_size=window,
            block_table=batch.tables, softcap=model.cap, q_descale=None, k_descale=None, v_descale=None,
            sinks=batch.per_head.sinks, alibi_slopes=batch.per_head.slopes, **(room if split else {}),
        )  # fmt: skip

    return Side(run, lambda: out, lambda: out)


def vllm_latent(batch: Batch) -> Side | None:
    """vLLM's Triton kernel for decodes over latents, which takes several rows of a request as this many decodes."""
    try:
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd as peer
    except ImportError:
        return None
    requests, device = batch.case.requests, batch.query.device
    if max(request.new for request in requests) > MOST_DECODES:
        return None
    rows, heads, _ = batch.query.shape
    new = torch.tensor([request.new for request in requests], device=device)
    tables = batch.tables.repeat_interleave(new, 0)
    ends = [request.cached + row + 1 for request in requests for row in range(request.new)]
    most = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    # as vLLM's backend for Triton chooses it
    splits = min(1 << (max(1, max(ends) // 512) - 1).bit_length(), most)
    lengths = torch.tensor(ends, dtype=torch.int32, device=device)
    out, log_sums = batch.out(), torch.empty(rows, heads, device=device)
    room = torch.empty(rows, heads, splits, batch.model.value_dim + 1, device=device)
    one = torch.ones((), device=device)

    def run() -> None:
        peer(
            batch.query, *batch.caches, out, log_sums, tables, lengths, room, splits, batch.model.spec.scale,
            batch.model.block_size, k_scale=one, v_scale=one, is_mla=True,
        )  # fmt: skip

    return Side(run, lambda: out, lambda: out)


def sdpa(batch: Batch, backend: SDPBackend) -> Side | None:
    """torch SDPA if all requests are alike: keys contiguous per request, which a paged cache never has."""
    requests, model = batch.case.requests, batch.model
    if len(set(requests)) > 1:
        return None
    count, new, tokens = len(requests), requests[0].new, requests[0].cached + requests[0].new
    ids = batch.tables.long()
    keys, values = (cache[ids].flatten(1, 2)[:, :tokens].transpose(1, 2).contiguous() for cache in batch.caches)
    groups = model.heads // model.kv_heads
    if new == 1:
        query = batch.query.view(count, model.kv_heads, groups, model.dim)
    else:
        query = batch.query.view(count, new, model.heads, model.dim).transpose(1, 2).contiguous()
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    last: list[Tensor] = []

    def run() -> None:
        with sdpa_kernel(backend):
            last[:] = [scaled_dot_product_attention(query, keys, values, is_causal=new > 1)]

    def rows() -> Tensor:
        return (last[0] if new == 1 else last[0].transpose(1, 2)).reshape(batch.query.shape)

    try:
        run()
    except RuntimeError:
        # torch reports "no available kernel": this backend does not support these shapes
        return None
    return Side(run, lambda: last[0], rows)
