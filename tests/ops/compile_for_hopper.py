"""Compiles the CUDA kernels for compute capability 9.0 where there is no GPU; prints each with its shared memory.

Machine code that reads what it never wrote is an error.

usage: python -m tests.ops.compile_for_hopper bfloat16|float32
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.ops.batch import Batch, Request, Shape, build
from tests.ops.local import Features, says_how_long, with_features
from tests.ops.quantised import packed_layer, random_weight
from tests.ops.rounded import ROUNDINGS, weight_of
from tests.ops.sass import never_written, uses_local
from tests.ops.states import Request as StateRequest
from tests.ops.states import plan
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl.cuda import fused as cuda_fused
from vllm_gaudi_ucm.ops.block_selection.implementation import BLOCK_SELECTION, ChoosingSpans
from vllm_gaudi_ucm.ops.causal_conv1d.implementation import CONVOLUTIONS
from vllm_gaudi_ucm.ops.chosen_tokens.implementation import CHOSEN_TOKENS, IndexRows, TokenPlaces
from vllm_gaudi_ucm.ops.gated_delta.implementation import GATED_DELTAS, DeltaRows
from vllm_gaudi_ucm.ops.gated_norm.implementation import GATED_NORMS
from vllm_gaudi_ucm.ops.kv_cache.impl.cuda import cache as kv_cache
from vllm_gaudi_ucm.ops.lora.impl.cuda import products as lora
from vllm_gaudi_ucm.ops.lora.implementation import LORA
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights
from vllm_gaudi_ucm.ops.moe.codes import CodedExperts, ExpertPacker
from vllm_gaudi_ucm.ops.moe.impl.cuda.choice import cuda_choose
from vllm_gaudi_ucm.ops.moe.implementation import MOE, ExpertWeights
from vllm_gaudi_ucm.ops.moe.spec import CODES, MoeSpec
from vllm_gaudi_ucm.ops.narrow_floats import E4M3
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.codes import CudaCodes, narrow_rows
from vllm_gaudi_ucm.ops.quantised_linear.impl.cuda.int8 import CudaInt8
from vllm_gaudi_ucm.ops.rejection_sampling.impl.cuda.rejection import cuda_accept_or_draw
from vllm_gaudi_ucm.ops.rms_norm.impl.cuda.norm import cuda_rms_norm
from vllm_gaudi_ucm.ops.rotary.impl.cuda.rotary import cuda_rotate
from vllm_gaudi_ucm.ops.row_noise.impl.cuda.noise import cuda_noise
from vllm_gaudi_ucm.ops.selected_list import SelectedList
from vllm_gaudi_ucm.ops.silu_and_mul.impl.cuda.gate import cuda_gate
from vllm_gaudi_ucm.ops.state_space.implementation import STATE_SPACES, SpaceRows
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attend as cuda_attend
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import parts as cuda_parts
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import plan as cuda_plan
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

WITHOUT_SPILLS = ("stream_boxes", "share_blocks", "estimate_codes", "rank_and_take", "update_deltas", "update_spaces")


class Hopper:
    """A driver that says what it drives and can launch nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_instead_of_launching(found: dict[str, int], cubins: dict[str, bytes]) -> None:
    """Every launch from here on compiles its kernel, and notes bytes of shared memory by name; and its machine code."""
    driver.set_active(Hopper())
    plain: Any = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        kernel = plain(self, *arguments, grid=grid, warmup=True, **named)
        cubins[f"{self.fn.__name__} {kernel.hash}"] = kernel.asm["cubin"]
        found[self.fn.__name__] = max(found.get(self.fn.__name__, 0), kernel.metadata.shared)

    JITFunction.run = run  # type: ignore[method-assign]


def attend(
    requests: list[Request],
    dtype: torch.dtype,
    block_size: int = 128,
    wanted: Features | None = None,
    dim: int = 128,
    narrow: bool = False,
    is_known_short: bool = False,
) -> Batch:
    """Also what only a Hopper does: kernels that start before the one ahead of them has ended."""
    cuda_plan.multiprocessors = lambda device: 132
    cuda_plan.starts_early = cuda_parts.starts_early = lambda device: True  # type: ignore[assignment]
    shape = Shape(32, 8, dim, dim, block_size, dtype, poison=0.0, memory="pairs by token")
    batch = with_features(build(requests, shape), wanted or Features(), block_size)
    if is_known_short:
        batch = says_how_long(batch)
    if narrow:
        batch.key_cache, batch.value_cache = batch.key_cache.to(E4M3), batch.value_cache.to(E4M3)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    plan = ATTENTION.make("cuda").plan(batch.parts, shape.block_size)
    assert ATTENTION.make("cuda").attend(
        *tensors, plan, batch.spec, torch.empty_like(batch.query), per_head=batch.per_head
    )
    return batch


def attend_small(dtype: torch.dtype) -> None:
    """New tokens of heads with small values: their kernels are where ptxas lost addresses."""
    shape = Shape(6, 6, 48, 32, 128, dtype, poison=0.0, memory="dense")
    batch = build([Request(0, 26)], shape)
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    plan = ATTENTION.make("cuda").plan(batch.parts, shape.block_size)
    assert ATTENTION.make("cuda").attend(*tensors, plan, batch.spec, batch.query.new_empty(*batch.query.shape[:2], 32))


def attend_latents(dtype: torch.dtype, narrow: bool = False) -> None:
    """A step with all parts of a model of DeepSeek's sizes. narrow: over a cache of 8-bit floats."""
    shape = Shape(128, 1, 576, 512, 64, dtype, poison=0.0, memory="in keys")
    requests = [Request(600, 1, prefix=2), Request(700, 3, prefix=2), Request(400, 2, chosen=frozenset({0, 1}))]
    batch = build(requests, shape)
    cache = batch.key_cache.to(E4M3) if narrow else batch.key_cache
    tensors = (batch.query, batch.key, batch.value, cache, cache[..., :512])
    plan = ATTENTION.make("cuda").plan(batch.parts, shape.block_size)
    assert ATTENTION.make("cuda").attend(*tensors, plan, batch.spec, batch.query.new_empty(*batch.query.shape[:2], 512))


def around_attention(dtype: torch.dtype) -> None:
    """The kernels of a decoder layer beside attention, for every form of them."""
    hidden, gates = torch.empty(2, 4096, dtype=dtype), torch.empty(2, 2 * 14336, dtype=dtype)
    cuda_rms_norm(hidden, hidden[0], 1e-5, hidden.clone(), in_place=True)
    cuda_rms_norm(hidden.view(2, 32, 128), hidden[0, :128], 1e-5, variance_size=64, plus_one=True)
    table = torch.empty(8, 128, dtype=dtype)
    for is_neox in (True, False):
        cuda_rotate(hidden, hidden[:, :1024], torch.zeros(2, dtype=torch.int64), table, 128, is_neox)
    cuda_gate(gates, "silu")
    cuda_gate(gates, "gelu")
    cuda_gate(gates, "gelu_tanh")
    cuda_noise(torch.zeros(2, dtype=torch.int32), torch.zeros(151936, dtype=torch.int32))
    shares, drafts = torch.zeros(2, 151936), torch.zeros(2, dtype=torch.int64)
    cuda_accept_or_draw(shares, drafts, shares, torch.zeros(2), shares)


def adapters(dtype: torch.dtype) -> None:
    """Products of 8 adapters of rank 16, of a layer with three slices and of one, of few rows and of many, which are
    grouped first; one after the other, and the first one alone.
    """
    lora.starts_early = lambda device: True  # type: ignore[assignment]
    implementation = LORA.make("cuda")
    for outputs in ((4096, 1024, 1024), (4096,)):
        own = torch.empty(sum(outputs), 4096, dtype=dtype)
        weights = AdapterWeights.joined_with(own, outputs, 8, 16)
        for rows in (1, 64, 300, 2048) if dtype.itemsize < 4 else (1,):
            x, y = torch.empty(rows, 4096, dtype=dtype), torch.empty(rows, sum(outputs), dtype=dtype)
            routes = implementation.route(torch.zeros(rows, dtype=torch.int64), 8, 16)
            implementation.add(y, x, routes, weights)
            implementation.finish(y, lora.narrow_in_parallel(x, routes, weights), routes, weights)
            joined = lora.Joined(torch.empty(rows, len(own) + len(weights.down), dtype=dtype))
            implementation.finish(implementation.own(joined, weights), joined, routes, weights)
    implementation.add_up(y, torch.empty(rows, 16, dtype=dtype), routes, weights)
    if dtype.itemsize < 4:
        # the most shared memory
        weights = AdapterWeights.zeros(4096, (4096, 1024, 1024), 4, 256, dtype, torch.device("cpu"))
        for rows in (1, 2048):
            x, y = torch.empty(rows, 4096, dtype=dtype), torch.empty(rows, 6144, dtype=dtype)
            implementation.add(y, x, implementation.route(torch.zeros(rows, dtype=torch.int64), 4, 256), weights)


def quantised(dtype: torch.dtype) -> None:
    """Products with few rows and with many, of each kind of codes."""
    for codes, block, bits in (
        (torch.float8_e4m3fn, (128, 128), 8),
        (torch.int8, (1, 256), 8),
        (torch.uint8, (1, 128), 4),
        (torch.uint8, (1, 32), 4),
    ):
        weight = random_weight(256, 256, block, codes, bits)
        product = CudaCodes(weight)
        layer = packed_layer(product, weight)
        for rows in (1, 40, 200, 300) if dtype.itemsize < 4 else (1,):
            product.multiply(torch.empty(rows, 256, dtype=dtype), layer, None)
    narrow_rows(torch.empty(3, 300, dtype=dtype))
    for name in ROUNDINGS:
        weight = weight_of(name, 4096, 4096)
        whole = CudaInt8(weight)
        layer = packed_layer(whole, weight)
        for rows in (1, 40, 200):
            whole.multiply(torch.empty(rows, 4096, dtype=dtype), layer, None)


def select(dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> None:
    """Summaries, scores, ranking and hand-over of two requests with a verification; every covered kind."""
    cached = cache_dtype or dtype
    cuda, ids = BLOCK_SELECTION.make("cuda"), torch.zeros(300, dtype=torch.int64)
    keys, query = torch.zeros(9, 128, 8, 128, dtype=cached), torch.zeros(10, 32, 128, dtype=dtype)
    for kind in (SummaryKind.MEAN, SummaryKind.MINMAX, SummaryKind.BOX_MEAN):
        summaries = torch.zeros(kind.shape(*keys.shape), dtype=cached)
        assert cuda.write(keys, ids[:2], summaries, kind)
        scores = cuda.scores(query, summaries, ids, ids, ids[:3], ids[:3], 5, 0.1, kind)
        assert scores is not None
    for kind in (SummaryKind.HASH, SummaryKind.CODES):
        summaries = torch.zeros(kind.shape(*keys.shape), dtype=torch.uint8)
        written = cuda.write(keys, ids[:2], summaries, kind)
        assert written == (kind is SummaryKind.CODES and cache_dtype is None)
        assert cuda.scores(query, summaries, ids, ids, ids[:3], ids[:3], 5, 0.1, kind) is not None
        # queries of large heads are rotated piece by piece
        large = torch.zeros(10, 8, 256, dtype=dtype)
        summaries = torch.zeros(kind.shape(9, 128, 2, 256), dtype=torch.uint8)
        assert cuda.scores(large, summaries, ids, ids, ids[:3], ids[:3], 5, 0.1, kind) is not None
    fresh = cuda.choose(scores, ids, 3, 256, 77)
    assert fresh is not None
    table, per_span = torch.zeros(3 * 256 + 1, dtype=torch.int64), 4 * [ids[:3]]
    cuda.take_choice(fresh, ChoosingSpans(fresh.clone(), *per_span, 256, table, 154, ids[:2]))
    cuda.keep_or_replace(fresh, fresh, *per_span[:3], 256)


def select_fused(dtype: torch.dtype, summary_dtype: torch.dtype | None = None) -> None:
    """As `select`, of a decode and of a verification, with the list that attention reads."""
    cuda_fused._multiprocessors = lambda device: 132  # type: ignore[assignment]
    cuda_fused.starts_early = lambda device: True  # type: ignore[assignment]
    fused, ids, kind = BLOCK_SELECTION.make("cuda_fused"), torch.zeros(300, dtype=torch.int64), SummaryKind.BOX_MEAN
    summaries = torch.zeros(kind.shape(9, 128, 8, 128), dtype=summary_dtype or dtype)
    assert fused.write(torch.zeros(9, 128, 8, 128, dtype=dtype), ids[:2], summaries, kind)
    query, spans, table = torch.zeros(10, 32, 128, dtype=dtype), ids[:3].clone(), torch.zeros(769, dtype=torch.int64)
    for rows in (1, 5):
        ready = fused.prepare(ids, spans, spans, rows, spans, spans, 77)
        scores = fused.scores(query, summaries, ids, ids, spans, spans, rows, 0.1, kind, ready)
        assert scores is not None
    stored, target = torch.zeros(4, 77, dtype=torch.int64), SelectedList(ids, ids[:154])
    choosing = ChoosingSpans(stored, *4 * [spans], 256, table, 154, ids[:2])
    fused.rank_and_take(scores, ids, choosing, ready, target)


def experts(dtype: torch.dtype) -> None:
    """Few pairs, which stand apart, and numbers of them for every size of tile; gates with and without biases."""
    w13, w2 = torch.empty(8, 1536, 2048, dtype=dtype), torch.empty(8, 2048, 768, dtype=dtype)
    biases = w13[:, :, 0].contiguous(), w2[:, :, 0].contiguous()
    gpt_oss = MoeSpec(interleaved=True, alpha=1.702, beta=1.0, limit=7.0, bias=True)
    for rows in (1, 64, 128, 256, 4096) if dtype.itemsize < 4 else (1, 64):
        x, ids = torch.empty(rows, 2048, dtype=dtype), torch.zeros(rows, 2, dtype=torch.int64)
        spec, added = (gpt_oss, biases) if rows == 64 else (MoeSpec(), ())
        MOE.make("cuda").compute(x, ids, torch.ones(rows, 2), ExpertWeights(w13, w2, *added), spec)


def coded_experts(dtype: torch.dtype) -> None:
    """Each kind of codes, with every size of tile."""
    for codes, block, kind, bits in (
        (torch.float8_e4m3fn, (128, 128), "whole", 8),
        (torch.uint8, (1, 128), "uint4", 4),
        (torch.float8_e4m3fn, (1, 32), "e2m1", 8),
    ):
        found = []
        for sizes in ((1536, 2048), (2048, 768)):
            packer = ExpertPacker(8, kind)
            packer.add(0, random_weight(*sizes, block, codes, bits))
            found.append(packer.finish())
        weights = CodedExperts(found[0], found[1], dtype)
        for rows in (1, 4096) if dtype.itemsize < 4 else (1,):
            x, ids = torch.empty(rows, 2048, dtype=dtype), torch.zeros(rows, 2, dtype=torch.int64)
            MOE.make("cuda").compute(x, ids, torch.ones(rows, 2), weights, MoeSpec(weights=CODES))


def choices(dtype: torch.dtype) -> None:
    """Of a few experts and many, with a bias and without one."""
    logits = torch.zeros(3, 128, dtype=dtype)
    cuda_choose(logits, 8, "softmax", True, None, 1.0, torch.int64)
    cuda_choose(torch.zeros(3, 700, dtype=dtype), 8, "sigmoid", True, torch.zeros(700), 2.5, torch.int32)


def chosen_tokens(dtype: torch.dtype) -> None:
    """A decode, a chunk over shared blocks and its new tokens in DeepSeek V3.2's sizes; attention over choices."""
    batch = build([Request(600, 1), Request(700, 3)], Shape(4, 1, 64, 64, 128, dtype, poison=0.0, memory="in keys"))
    unique, rows = batch.parts.unique, len(batch.query)
    assert unique is not None
    places = unique._replace(places=torch.zeros_like(unique.rows), most_of_row=5)
    keys, slots = torch.empty(batch.key_cache.shape[0] * 128, 128, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    index = IndexRows(torch.empty(rows, 64, 128, dtype=dtype), keys[:rows], torch.empty(rows, 64))
    cuda = CHOSEN_TOKENS.make("cuda")
    found = cuda.choose(index, keys, TokenPlaces(batch.parts._replace(unique=places), slots, 128), 256)
    cuda.attend(torch.empty(rows, 128, 576, dtype=dtype), torch.empty(640, 576, dtype=dtype), found, 0.1, 512)


def layers_with_states(dtype: torch.dtype) -> None:
    """Decodes, verifications of three drafts, and prompts, of layers as in Qwen3-Next and Granite 4-h."""
    for few, rows in ((1, 1), (4, 4), (1, 130)):
        step, heads = plan([StateRequest(rows, 1, {0: 2})], few), torch.zeros(128)
        q, v = (torch.empty(rows, count, 128, dtype=dtype) for count in (16, 32))
        deltas = DeltaRows(q, q, v, torch.empty(rows, 32), torch.empty(rows, 32))
        GATED_DELTAS.make("cuda").scan(deltas, torch.empty(3, 32, 128, 128), step, normalise=True)
        x, group = torch.empty(rows, 128, 64, dtype=dtype), torch.empty(rows, 1, 128, dtype=dtype)
        spaces = SpaceRows(x, torch.empty(rows, 128), group, group)
        STATE_SPACES.make("cuda").scan(spaces, heads, heads, torch.empty(3, 128, 64, 128), step)
        gates = torch.empty(rows, 16, 4, dtype=dtype)
        GATED_DELTAS.make("cuda").gates(gates[..., 2:], gates[..., :2], torch.empty(32), torch.empty(32))
        STATE_SPACES.make("cuda").time_steps(x[:, 0], heads[:64])
        for groups, gate_first in ((v, False), (x.view(rows, 1, -1), True)):
            weight = torch.empty(groups.shape[-1], dtype=dtype)
            GATED_NORMS.make("cuda").norm(groups, groups, weight, 1e-6, gate_first=gate_first)
        states, weight = torch.empty(3, 3, 8192, dtype=dtype), torch.empty(8192, 4, dtype=dtype)
        for bias in (None, weight[:, 0].contiguous()):
            convolution = CONVOLUTIONS.make("cuda")
            convolution.convolve(torch.empty(rows, 8192, dtype=dtype), weight, bias, states, step, silu=True)


def main(dtype: torch.dtype) -> None:
    chosen = frozenset({0, 1})
    found: dict[str, int] = {}
    cubins: dict[str, bytes] = {}
    compile_instead_of_launching(found, cubins)
    attend([Request(40, 1)], dtype, block_size=64)
    if dtype.itemsize < 4:
        # the same kernels as below, where they have the step alone: what multiplies float32 takes long to compile
        attend([Request(600, 1)], dtype)
    everything = [Request(600, 1, prefix=2), Request(700, 3, prefix=2), Request(400, 1, chosen=chosen)]
    batch = attend(everything, dtype)
    if dtype.itemsize < 4:
        # a cache of 8-bit floats
        attend(everything, dtype, narrow=True)
        # as in a step of many rows
        cuda_attend.CONTINUED = 1
        attend(everything, dtype)
        local = Features(300, cap=30.0, sinks=True)
        verified = [Request(600, 1, prefix=2), Request(700, 3, prefix=2)]
        attend(verified, dtype, wanted=local)
        attend(verified, dtype, wanted=local, is_known_short=True)
        attend([*verified, Request(300, 1)], dtype, wanted=local, dim=64, is_known_short=True)
        attend([Request(600, 1), Request(700, 3)], dtype, dim=512)
        attend([Request(600, 1, prefix=2), Request(700, 3, prefix=2)], dtype, wanted=Features(slopes=True, sinks=True))
    if dtype.itemsize < 4:
        attend_small(dtype)
        # half of the time of all of them in float32, which no model with latents is served in
        attend_latents(dtype)
        attend_latents(dtype, narrow=True)
        chosen_tokens(dtype)
    rows = batch.key_cache.flatten(0, 1), batch.value_cache.flatten(0, 1)
    kv_cache.write(batch.key, batch.value, *rows, batch.slots)
    kv_cache.copy([batch.key_cache], [batch.value_cache], torch.zeros(1, 2, dtype=torch.int64))
    around_attention(dtype)
    adapters(dtype)
    select(dtype)
    select_fused(dtype)
    if dtype.itemsize < 4:
        # summaries of 8-bit floats beside keys of 16 bits
        select_fused(dtype, E4M3)
        spilled = [name for name, cubin in cubins.items() if name.startswith(WITHOUT_SPILLS) and uses_local(cubin)]
        if spilled:
            raise SystemExit(f"{spilled} use local memory")
    if dtype.itemsize < 4:
        select(dtype, E4M3)
    quantised(dtype)
    experts(dtype)
    coded_experts(dtype)
    choices(dtype)
    layers_with_states(dtype)
    assert not never_written(cubins), never_written(cubins)
    for name, shared in found.items():
        print(name, shared)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]))
