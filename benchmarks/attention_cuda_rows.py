"""Requests with several rows after a cached context: verifications of drafts, chunks of prompts.

`python -m benchmarks.attention --device cuda --rows`. Like `attention_cuda`, but planned and staged as in an engine: at
the true shape, and in a bucket. vLLM's Triton kernel is measured as well; with `--variants` instead of `--rows` also
other sizes of tiles, with `--models --variants` sizes for windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.attention_cuda_case import Batch, Case, Request
from benchmarks.attention_cuda_sides import Side, ours, vllm_triton
from vllm_gaudi_ucm.batch.batch_plan import BatchInput, UnifiedPlan, plan_batch
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.batch.window import WHOLE, Window
from vllm_gaudi_ucm.execution.graph_manager import BucketTensors
from vllm_gaudi_ucm.execution.step_tensors import true_shape
from vllm_gaudi_ucm.execution.true_shape_tensors import TrueShapeTensors
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts

Sides = dict[str, Side | None]
PRODUCTS = 790e12  # bf16 FLOP/s of an H200 in large matrix products
SLICE = 512
BUCKET = "bucket"

CASES = (
    Case("verify 32 x (4096 + 5)", (Request(4096, 5),) * 32, 0.19),
    Case("verify 64 x (4096 shared + 512 + 4)", (Request(4096 + 512, 4, 4096),) * 64, 0.08),
    Case("2048 after 30K, 63 decodes at 2K", (*(Request(2047, 1),) * 63, Request(30 * 1024, 2048)), 1.8),
    Case("8 chunks of 256 after 4K", (Request(4096, 256),) * 8, 0.27),
    Case("512 after 100K", (Request(100 * 1024, 512),), 1.5),
    Case("2 chunks of 512 after 4K shared", (Request(4096, 512, 4096),) * 2, 0.15),
    Case("7 chunks of 300 after 5K", (Request(5000, 300),) * 7, 0.30),
    Case("verify 32 x (4000 + 5)", (Request(4000, 5),) * 32, 0.19),
)


def planned(batch: Batch) -> Batch:
    """The batch with the parts of its plan at their true shape."""
    plan, tokens = _plan(batch)
    inputs, _ = TrueShapeTensors(batch.query.device).stage(PlannedStep.of_tokens(plan, tokens))
    return replace(batch, parts=inputs.parts)


def in_bucket(batch: Batch) -> Batch:
    """The batch with the parts of the largest bucket of a server that would just take it: padded only in requests."""
    plan, tokens = _plan(batch)
    requests = batch.case.requests
    limits = Limits(
        max_num_batched_tokens=plan.num_rows,
        max_num_seqs=max(64, len(requests)),
        max_model_len=max(request.cached + request.new for request in requests),
        block_size=batch.model.block_size,
        num_blocks=batch.caches[0].shape[0],
        contiguous=False,
        window=batch.model.window or (WHOLE if batch.model.slopes else 0),
    )
    tensors = BucketTensors(limits, SLICE, batch.query.device)
    shape = true_shape(plan, 0 if plan.unique is None else len(plan.unique.blocks)).forward
    parts: AttentionParts = tensors.split(tensors.fill(shape, PlannedStep.of_tokens(plan, tokens)), shape).parts
    return replace(batch, parts=parts)


def _plan(batch: Batch) -> tuple[UnifiedPlan, np.ndarray]:
    """Plans as the planner does; the requests of the case are in flat order already."""
    requests = batch.case.requests
    computed, new = (np.array(column, np.int32) for column in zip(*((r.cached, r.new) for r in requests), strict=True))
    model = batch.model
    window = Window(model.window or WHOLE, by_distance=model.slopes) if model.window or model.slopes else None
    plan = plan_batch(
        BatchInput(computed, new, computed + new, (batch.tables.cpu().numpy(),)),
        batch.model.block_size,
        SLICE,
        window=window,
    )
    assert (plan.requests == np.arange(len(requests))).all(), "the case has single rows behind others"
    return plan, np.zeros(plan.num_rows, np.int64)


def least_ms(batch: Batch, rate: float) -> float:
    """The longer of the bytes at `rate` per second, and the products."""
    return max(batch.bytes / rate, batch.flops / PRODUCTS) * 1e3


class Variant(NamedTuple):
    """Differences from the choice of the implementation; None: no difference.

    own, shared: (rows times heads, keys, stages, warps) of a tile. programs: of own blocks, per kv head. merge: heads
    and pieces that a program of the merge reads at once. balanced: unique blocks per shared pair, see `cuda_attend`.
    continued: rows from which the causal part continues own blocks. single_loop: number of single rows, together with
    own blocks, from which one loop takes all of them. causal: a tile of the causal part. windows: the thresholds of
    `cuda_windows`, by name; a tile like own and shared.
    """

    name: str
    own: tuple[int, int, int, int] | None = None
    shared: tuple[int, int, int, int] | None = None
    programs: int | None = None
    merge: tuple[int, int] | None = None
    balanced: int | None = None
    continued: int | None = None
    single_loop: int | None = None
    windows: Mapping[str, Any] = MappingProxyType({})
    causal: tuple[int, int, int, int] | None = None


VARIANTS = (
    Variant("own 64x64x2", own=(64, 64, 2, 4)),
    Variant("own 64x128x2", own=(64, 128, 2, 4)),
    Variant("own 128x64x3", own=(128, 64, 3, 8)),
    Variant("own 128x128x2", own=(128, 128, 2, 8)),
    Variant("own 32x128x2", own=(32, 128, 2, 4)),
    Variant("own 32x64x3", own=(32, 64, 3, 4)),
    Variant("causal continues own", continued=1),
    Variant("causal with own", continued=1 << 30),
    Variant("own 33 programs", programs=33),
    Variant("own 16 programs", programs=16),
    Variant("own 64 programs", programs=64),
    Variant("merge 4, 2", merge=(4, 2)),
    Variant("merge 4, 8", merge=(4, 8)),
    Variant("merge 8, 2", merge=(8, 2)),
    Variant("merge 16, 1", merge=(16, 1)),
    Variant("unique alone", balanced=0),
    Variant("single rows in one loop", single_loop=64),
    Variant("shared 64x128x2", shared=(64, 128, 2, 4)),
    Variant("shared 64x64x2", shared=(64, 64, 2, 4)),
    Variant("shared 128x64x3", shared=(128, 64, 3, 8)),
    Variant("shared 128x128x2", shared=(128, 128, 2, 8)),
)
WINDOW_VARIANTS = (
    Variant("tiles of many requests", windows={"ONE_LAUNCH_ROWS": 0, "BY_REQUEST": False}),
    Variant("tiles of one request", windows={"ONE_LAUNCH_ROWS": 0}),
    Variant("of one request, chunks, too", windows={"ONE_LAUNCH_ROWS": 0, "FEW_ROWS": 1 << 30}),
    Variant("of one request, 16x64x3", windows={"ONE_LAUNCH_ROWS": 0, "window_tile": (16, 64, 3, 4)}),
    Variant("causal by 8 warps", causal=(64, 32, 3, 8)),
    Variant("one launch", windows={"ONE_LAUNCH_TOKENS": 1 << 30}),
    Variant("one launch, 32x64x2", windows={"ONE_LAUNCH_TOKENS": 1 << 30, "window_tile": (32, 64, 2, 4)}),
    Variant("one launch, 64x64x3", windows={"ONE_LAUNCH_TOKENS": 1 << 30, "window_tile": (64, 64, 3, 4)}),
    Variant("one launch, 16 new", windows={"ONE_LAUNCH_TOKENS": 1 << 30, "NEW": 16}),
)


def sides(batch: Batch) -> Sides:
    """Ours in a bucket, and vLLM's."""
    return {BUCKET: ours(in_bucket(batch), "auto"), "triton 2d": vllm_triton(batch, split=False)}


def variant_sides(batch: Batch) -> Sides:
    """Returns the same with other tiles."""
    return sides(batch) | {variant.name: ours_as(batch, variant) for variant in VARIANTS}


def window_sides(batch: Batch) -> Sides:
    """The same under a window."""
    return sides(batch) | {variant.name: ours_as(batch, variant) for variant in WINDOW_VARIANTS}


def ours_as(batch: Batch, variant: Variant) -> Side | None:
    """Ours as the variant chooses; None if that does not fit the GPU."""
    side = ours(batch, "cuda")

    def run() -> None:
        with _chosen(variant):
            side.run()

    try:
        run()
    except Exception as error:  # a tile that does not fit the GPU
        print(f"{variant.name}: {type(error).__name__}")
        return None
    return side._replace(run=run)


@contextmanager
def _chosen(variant: Variant) -> Iterator[None]:
    """The kernels' sizes are functions of the layer; only a benchmark replaces them."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attend as cuda_attend
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import own as cuda_own
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import parts as cuda_parts
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import windows as cuda_windows
    from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import Tile

    with ExitStack() as stack:

        def patch(module: ModuleType, name: str, value: Any) -> None:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)

        if (own := variant.own) is not None:
            patch(cuda_own, "own_tile", lambda layer: Tile(*own))
        if (shared := variant.shared) is not None:
            patch(cuda_parts, "shared_tile", lambda *_: Tile(*shared))
        if (programs := variant.programs) is not None:
            patch(cuda_own, "programs_of", lambda *_: programs)
        if variant.merge is not None:
            patch(cuda_parts, "OF_SEVERAL", variant.merge)
        if variant.balanced is not None:
            patch(cuda_attend, "BALANCED", variant.balanced)
        if variant.continued is not None:
            patch(cuda_attend, "CONTINUED", variant.continued)
        if variant.single_loop is not None:
            patch(cuda_parts, "MANY_BESIDE", variant.single_loop)
        if variant.causal is not None:
            patch(cuda_parts, "causal_tile", _tile_function(Tile(*variant.causal)))
        for name, value in variant.windows.items():
            patch(cuda_windows, name, _tile_function(Tile(*value)) if isinstance(value, tuple) else value)
        yield


def _tile_function(tile: Any) -> Callable[..., Any]:
    return lambda *_: tile
