"""Measures the memory of graphs and their activations, before the KV cache takes the rest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_ucm.decisions.bucket_choice import (
    choose_buckets,
    cost_model,
    reads_own_blocks,
    server_limits,
    step_memory,
)
from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution, Capture
from vllm_gaudi_ucm.execution.decoder import HIDDEN
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.runners.maker import runner_maker
from vllm_gaudi_ucm.graphs.warm_up.agreement import ALONE, Agreement
from vllm_gaudi_ucm.graphs.warm_up.extremes import largest_of_phases
from vllm_gaudi_ucm.graphs.warm_up.graph_memory import check_budget
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.kv_cache.allocation import bind_kv_caches, dummy_kv_cache, kv_cache_specs, no_kv_cache
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.ops.unified_attention.api import choose_static_implementation
from vllm_gaudi_ucm.runner.kv_groups import layer_groups
from vllm_gaudi_ucm.runner.other_groups import allocate_others, leave_others
from vllm_gaudi_ucm.start.kernel_compilation import KernelCompilation, compile_kernels
from vllm_gaudi_ucm.start.sparse_setup import make_sparse_worker
from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheSpec, groups_of, in_blocks_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.decisions.graph_kind import GraphKind
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.shapes.limits import Limits
    from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShapes
    from vllm_gaudi_ucm.runner.model_pooler import ModelPooler
    from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits

logger = plugin_logger(__name__)

GIB = 1 << 30
# If `ucm.graphs.memory_budget` is not given: this share of the device, or twice the memory of the largest graphs if
# that is more.
DEFAULT_SHARE = 0.1
DEFAULT_FACTOR = 2.0


class GraphMemoryNeed(NamedTuple):
    """Bytes to reserve in addition to the KV cache: for graphs, and for the buffers that all of them share.

    kernels: compiled on the way.
    """

    budget: int
    buffers: int
    kernels: KernelCompilation


def graph_memory_need(
    decoder: Decoder,
    vllm_config: VllmConfig,
    config: UcmConfig,
    device: Device,
    kind: GraphKind,
    draft_model: Decoder | None = None,
    compiler: StaticCompiler | None = None,
    tile: int | None = None,
    agreement: Agreement = ALONE,
) -> GraphMemoryNeed:
    """Measures the largest graphs of prompts, of decodes and of logits, which are actually run, of both models.

    tile: slots that attention reads as a block, where each token has a slot of its own; None: it has blocks.
    agreement: of all workers.

    Raises:
        MemoryBudgetError: `ucm.graphs.memory_budget` does not hold these.
    """
    measured, buffers, kernels = _measure(
        decoder,
        vllm_config,
        config,
        device,
        kind=kind,
        draft_model=draft_model,
        compiler=compiler,
        tile=tile,
        agreement=agreement,
    )
    given = config.graphs.memory_budget
    if given is None:
        largest = DEFAULT_FACTOR * sum(measured)
        return GraphMemoryNeed(int(max(DEFAULT_SHARE * device.memory().total, largest)), buffers, kernels)
    budget = int(given * GIB)
    check_budget(measured, budget, vllm_config.scheduler_config.max_num_batched_tokens)
    return GraphMemoryNeed(budget, buffers, kernels)


@torch.inference_mode()
def _measure(
    decoder: Decoder,
    vllm_config: VllmConfig,
    config: UcmConfig,
    device: Device,
    kind: GraphKind,
    draft_model: Decoder | None,
    compiler: StaticCompiler | None,
    tile: int | None,
    agreement: Agreement,
) -> tuple[list[int], int, KernelCompilation]:
    """Returns the bytes of each graph, the configured maximum first, the bytes of buffers, and the compiled kernels.

    The number of blocks is not known yet: as many as would fill the free memory are assumed. Pads read only the dummy
    block, so a cache of one block is enough, and blocks are gathered, which takes at least what a slice does.
    """
    specs = kv_cache_specs(
        vllm_config, choosing=config.ucm_sparse_method is not None, with_draft_model=draft_model is not None
    )
    if tile is not None:
        specs = in_blocks_of(specs, tile)
    tensors_on = device.torch_device()
    caches = dummy_kv_cache(specs, tensors_on)
    bind_kv_caches(vllm_config, caches)
    # vLLM's specs of slots have no groups: a draft model or a window is refused with these
    made = None if tile is not None else groups_of(vllm_config, specs)
    groups = None if made is None else layer_groups(made, vllm_config)
    if groups is not None:
        allocate_others(groups, vllm_config, 1, tensors_on)
    draft_groups = None
    if made is not None and draft_model is not None:
        draft_groups = layer_groups(made, vllm_config, of_draft_model=True)
    block_size, num_blocks = _largest_cache(device, specs, 1 if made is None else len(made))
    # the least of all workers: they compute the same shapes
    num_blocks = -agreement.most(-num_blocks)
    sparse = make_sparse_worker(config, vllm_config, caches, block_size, num_blocks, static=True)
    choices = None if sparse is None else sparse.limits
    selected = 0 if choices is None else choices.max_selected_blocks
    shared = config.graphs.max_shared_blocks
    memory = step_memory(vllm_config, config, device.kind)
    by_token = tile is not None
    limits = server_limits(
        vllm_config,
        block_size,
        num_blocks,
        False,
        max_shared_blocks=shared,
        max_selected_blocks=selected,
        memory=memory,
        by_token=by_token,
        window=decoder.window,
        own_blocks=reads_own_blocks(config, device.kind),
    )
    ready = ReadyBuckets(_largest_buckets(limits, cost_model(vllm_config, device, block_size)))
    free = device.memory().free
    make_runner = runner_maker(kind, compiler)
    executions = [
        BucketedExecution(
            model,
            ready,
            tensors_on,
            Capture(
                make_runner,
                lambda label: nullcontext(),
                config.attention.causal_slice,
                implementation=choose_static_implementation(
                    config.attention.implementation, tensors_on.type, model.specs
                ),
                compiler=compiler,
            ),
            sparse=sparse if model is decoder else None,
            rows_each=1 + vllm_config.num_speculative_tokens if model is decoder else 1,
            groups=groups if model is decoder else draft_groups,
        )
        for model in filter(None, (decoder, draft_model))
    ]
    buffers = max(0, free - device.memory().free) + _sampling_bytes(executions[0], vllm_config)
    expected = partial(
        _expected_buckets, config, vllm_config, limits, device, remainders=executions[0].remainders, choices=choices
    )
    kernels = compile_kernels(executions, largest_of_phases(limits), expected, agreement)
    measured = [_bytes_of(run, device) for run in _runs(executions, ready)]
    bind_kv_caches(vllm_config, no_kv_cache(specs, tensors_on))
    leave_others(vllm_config)
    del executions, sparse, groups
    gc.collect()
    device.empty_cache()
    return measured, buffers, kernels


def _runs(executions: list[BucketedExecution], ready: ReadyBuckets) -> Iterator[Callable[[], object]]:
    """Returns functions that each make one graph of every model that has it; the target is the first model."""

    def of_all(run: Callable[[BucketedExecution], object]) -> Callable[[], object]:
        return lambda: [run(execution) for execution in executions]

    for shape in reversed(ready.buckets.forward):
        yield of_all(partial(BucketedExecution.warm_forward, shape=shape))
    yield of_all(partial(BucketedExecution.warm_logits, rows=ready.maximum[1]))
    remainders = executions[0].remainders
    for shape in () if remainders is None else remainders.shapes:
        yield partial(executions[0].warm_remainder, shape)


def _bytes_of(run: Callable[[], object], device: Device) -> int:
    free = device.memory().free
    run()
    device.synchronize()
    return max(0, free - device.memory().free)


def _largest_cache(device: Device, specs: dict[str, KVCacheSpec], num_groups: int) -> tuple[int, int]:
    """Tokens per block, and how many blocks would fill the free memory. A block is of the layers of one group."""
    block_bytes = -(-sum(spec.page_size_bytes for spec in specs.values()) // num_groups)
    return next(iter(specs.values())).block_size, max(2, device.memory().free // block_bytes)


def _largest_buckets(limits: Limits, cost: CostModel) -> BucketSet:
    """The configured maximum and the largest step of decodes, the maximum last."""
    decodes = limits.phase_maximum(causal=False, shared=True, unique=True, selected=True)
    return BucketSet([decodes], [], limits, cost)


def _expected_buckets(
    config: UcmConfig,
    vllm_config: VllmConfig,
    limits: Limits,
    device: Device,
    remainders: RemainderShapes | None,
    choices: SelectionLimits | None,
) -> Sequence[ForwardShape]:
    """Returns the buckets of a server with this many blocks. It will have fewer, with nearly the same kernels."""
    count = 0 if remainders is None else len(remainders.keys)
    live, rows = 0 if choices is None else choices.room_for_live_blocks, 1 + vllm_config.num_speculative_tokens
    try:
        buckets, _ = choose_buckets(
            config.graphs, vllm_config, limits, device, num_remainders=count, live_blocks=live, rows_each=rows
        )
    except ValueError as error:
        # such as a file made for a server's own number of blocks; the start reports its faults
        logger.debug("kernels of the largest graphs alone are compiled ahead: %s", error)
        return []
    return buckets.forward


def _sampling_bytes(execution: BucketedExecution, vllm_config: VllmConfig) -> int:
    """Logits of divided steps (float32), and the history that penalties read (int32), for every request."""
    logits = execution.logits_width * (1 + vllm_config.num_speculative_tokens)
    return 4 * execution.max_logits * (logits + vllm_config.model_config.max_model_len)


@torch.inference_mode()
def run_largest_step(
    decoder: Decoder, vllm_config: VllmConfig, device: torch.device, pooler: ModelPooler | None
) -> None:
    """Runs the largest step without attention, whose tiles bound its memory."""
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    found = decoder.run_layers(decoder.unattended(tokens, device))
    rows = min(tokens, vllm_config.scheduler_config.max_num_seqs)
    if decoder.has_logits:
        decoder.logits(found[HIDDEN][:rows])
    if pooler is not None and decoder.is_last:
        pooler.pool_dummies(found[HIDDEN], rows)
