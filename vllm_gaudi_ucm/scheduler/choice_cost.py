"""Estimates that the scheduler uses to decide whether choosing blocks pays off."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm_gaudi_ucm.graphs.cost.specs import CHOICES, DEFAULT_SPECS, device_spec
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import LimitsError
from vllm_gaudi_ucm.sparse.block_sparse import BlockSparse
from vllm_gaudi_ucm.sparse.choice_cost import ChoiceCost, PromptCost
from vllm_gaudi_ucm.sparse.selection.block_selector import layer_leaders
from vllm_gaudi_ucm.sparse.selection.sparse_worker import score_flops, summary_share

if TYPE_CHECKING:
    from vllm_gaudi_ucm.sparse.base import UcmSparseBase
    from vllm_gaudi_ucm.sparse.step_sizes import StepSizes
    from vllm_gaudi_ucm.vllm_api.kv_cache import AttentionSpec
    from vllm_gaudi_ucm.vllm_api.scheduling import Scheduler


class BucketSeconds:
    """Estimates the time of a step in the bucket to which it is padded, see StepSeconds. Modelled, like the choice of
    buckets; all buckets count as warm.

    Args:
        buckets: the workers' buckets, if attention never reads a slice of the cache, and no token has a slot.
    """

    def __init__(self, buckets: BucketSet) -> None:
        self._buckets = buckets

    def __call__(self, sizes: StepSizes) -> float | None:
        shape = ForwardShape.from_sizes(sizes.has_prompt, sizes.rows, sizes.shared, sizes.unique, sizes.selected)
        try:
            bucket = self._buckets.lookup(shape.step(0)).forward
        except LimitsError:
            return None
        return float(self._buckets.cost.forward_seconds("c" in bucket.phase, *bucket.sizes))


def register_choice_cost(scheduler: Scheduler, method: UcmSparseBase) -> None:
    """Lets a method that chooses blocks keep steps dense if that is faster, unless its options say `always`.

    The estimates are for one worker; all ranks have the same layers and heads.
    """
    choosing = method.selecting_method
    if not isinstance(choosing, BlockSparse) or choosing.block_options.sparse_steps == "always":
        return
    groups = scheduler.kv_cache_config.kv_cache_groups
    # pages of all groups have the same size
    spec = cast("AttentionSpec", groups[0].kv_cache_spec)
    choices = _choosing_layers(scheduler, sum(len(group.layer_names) for group in groups))
    dense = [place for place, number in enumerate(choices) if number in choosing.dense_layers]
    leaders = layer_leaders(len(choices), choosing.reuse_layers, dense)
    device = DEFAULT_SPECS[str(scheduler.vllm_config.device_config.device_type)]
    sizes = spec.head_size, spec.head_size_v, spec.dtype.itemsize
    share = summary_share(choosing.block_options, scheduler.block_size, *sizes)
    # a page of the cache has as many tokens as a block, or a single one with slots for tokens
    block_bytes = spec.page_size_bytes / spec.block_size * scheduler.block_size
    scored_bytes = share * block_bytes
    if choosing.block_options.is_coded:
        of_heads = scheduler.block_size, spec.num_kv_heads, spec.head_size
        scored_bytes += CHOICES[device].sign_bytes * score_flops(choosing.block_options, *of_heads)
    choosing.register_choice_cost(
        ChoiceCost(
            sparse_layers=sum(leader is not None for leader in leaders),
            choosing_layers=len({leader for leader in leaders if leader is not None}),
            block_bytes=block_bytes,
            summary_bytes=scored_bytes,
            bandwidth=device_spec(device).bandwidth,
            layer_seconds=CHOICES[device].layer_seconds,
            step_seconds=CHOICES[device].step_seconds,
            prompts=_prompt_cost(scheduler, choosing, spec, device_spec(device).flops),
        )
    )


def _prompt_cost(scheduler: Scheduler, method: BlockSparse, spec: AttentionSpec, flops: float) -> PromptCost:
    config, size = scheduler.vllm_config, scheduler.block_size
    heads = config.model_config.get_num_attention_heads(config.parallel_config)
    attended = 2 * heads * size * (spec.head_size + spec.head_size_v)
    return PromptCost(attended, score_flops(method.block_options, size, heads, spec.head_size), flops)


def register_buckets(method: UcmSparseBase, buckets: object | None) -> None:
    """Lets the method compare the buckets of a dense step and of a sparse one, once a worker has sent its buckets.

    Sizes still decide with sign codes, whose scores buckets do not count; if a layer is dense in sparse steps; or if
    the bucket of a step depends on which blocks it has, with slices of the cache or a slot for each token.
    """
    if not isinstance(buckets, BucketSet) or buckets.limits.contiguous or buckets.limits.strip:
        return
    choosing = method.selecting_method
    if not isinstance(choosing, BlockSparse) or choosing.choice_cost is None or choosing.dense_layers:
        return
    if not choosing.block_options.is_coded:
        choosing.register_step_seconds(BucketSeconds(buckets))


def _choosing_layers(scheduler: Scheduler, num_layers: int) -> list[int]:
    """Returns the worker's layers that see whole contexts; the model's first layers represent those of each stage."""
    config = scheduler.vllm_config.model_config.hf_text_config
    kinds = list(config.to_dict().get("layer_types") or ())[:num_layers]
    if "full_attention" not in kinds:
        return list(range(num_layers))
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
