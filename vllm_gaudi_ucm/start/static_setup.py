"""Makes static shapes: their limits, buckets and graphs."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.decisions.bucket_choice import choose_buckets, reads_own_blocks, server_limits, step_memory
from vllm_gaudi_ucm.execution.bucketed_execution import remainder_shapes
from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
from vllm_gaudi_ucm.vllm_api.cache_options import tile_of_slots

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.runner.loaded_model import AllocatedModel


def make_static(allocated: AllocatedModel) -> StaticShapes:
    """Makes static shapes for a model with a KV cache, and room for the logits of divided steps."""
    model, sparse = allocated.model, allocated.sparse
    limits, choices = _limits(allocated), None if sparse is None else sparse.limits
    remainders = remainder_shapes(limits, choices)
    buckets, usage = choose_buckets(
        model.config.graphs,
        model.vllm_config,
        limits,
        model.device,
        0 if remainders is None else len(remainders.keys),
        *((0, 1) if choices is None else (choices.room_for_live_blocks, choices.max_rows)),
    )
    static = StaticShapes(allocated, buckets, usage, partial(_refill, allocated))
    static.divided_logits.reserve(model.vllm_config.num_speculative_tokens)
    if sparse is not None and model.device.kind == "hpu":
        # kernels on other devices skip pads
        sparse.send_buckets(static.execution.ready.buckets)
    return static


def _limits(allocated: AllocatedModel) -> Limits:
    model, block_size = allocated.model, allocated.block_size
    config, vllm_config, sparse = model.config, model.vllm_config, allocated.sparse
    if model.by_token:
        # the scheduler bounds the ranges of these
        assert tile_of_slots(vllm_config) == block_size, (tile_of_slots(vllm_config), block_size)
    return server_limits(
        vllm_config,
        block_size,
        allocated.kv_cache_config.num_blocks,
        # a graph has one form, and even with compaction a step may find a block in use that has not moved down yet: a
        # graph that reads a slice would need a second one that gathers, so `auto` gathers
        config.attention.contiguous_pa is True,
        config.graphs.max_shared_blocks,
        0 if sparse is None or sparse.limits is None else sparse.limits.max_selected_blocks,
        memory=step_memory(vllm_config, config, model.device.kind),
        by_token=model.by_token,
        window=allocated.groups.kv[0].window,
        own_blocks=reads_own_blocks(config, model.device.kind),
    )


def _refill(allocated: AllocatedModel) -> None:
    """Resets tensors to their initial values, before any request."""
    sparse = allocated.sparse
    for rows in chain.from_iterable(allocated.kv_caches.values()):
        rows.zero_()
    for group in allocated.groups.groups:
        group.refill()
    if sparse is not None and sparse.selector is not None:
        sparse.selector.refill()
