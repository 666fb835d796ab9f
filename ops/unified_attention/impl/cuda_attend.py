"""A layer of Unified Attention in Triton: grids depend on shapes only; the device reads the actual counts.

The parts that read the cache divide their work evenly among programs, across row boundaries; a final kernel adds the
partial results of each row over all parts. A step with only a causal part is one kernel. Nothing is read on the host,
so `plan` and `attend` may be captured in a CUDA graph. Even division over (row, block) pairs is "stream-K" (Osama et
al. 2023); reduction in a second launch is Flash-Decoding (Dao et al. 2023).

Keys are not checked themselves: a key with a score of -Inf has weight 0.
"""

from __future__ import annotations

import logging
import math

from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_layer import Layer, why_not
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_parts import causal, listed_pairs, merge, selected, shared, unique
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda_plan import CudaPlan, Work, run_side_by_side
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec

logger = logging.getLogger(__name__)
_told: set[str] = set()

# Columns listed per tile of rows, int32 twice: beyond this the lists are larger than what they save.
MOST_LISTED = 1 << 27
# Up to so many unique blocks for each pair of a tile of rows and a shared block, the two parts take about as long: each
# then gets half of the GPU (H200, 64 decodes at 8192 shared and 512 own tokens: 0.081 -> 0.077 ms).
BALANCED = 2
# Rows times query heads of a kv head that one program holds: a verification of many drafts, at most.
LARGEST_SPAN = 128


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: CudaPlan,
    spec: AttentionSpec,
    out: Tensor,
    selected_blocks: Tensor | None = None,
) -> bool:
    """Writes the attention of one layer to `out`. Returns False, and logs it once, if the kernels do not cover it.

    selected_blocks: int64 [selected], blocks of this layer instead of those in the plan's selected part.
    """
    layer = Layer(query, key, value, key_cache, value_cache, out, spec.scale * math.log2(math.e))
    if not layer.rows:
        return True
    reason = why_not(layer) or _too_large(layer, plan)
    if reason is not None:
        _tell(reason)
        return False
    work = _work(layer, plan, selected_blocks)
    found = [one.found for one in work if one.found is not None]
    if plan.starts is not None:
        work.append(causal(layer, plan, plan.starts, found))
    if not work:
        out.zero_()
        return True
    run_side_by_side(work, query.device)
    if found:
        merge(layer, plan, found, alone=len(work) == 1)
    return True


def _work(layer: Layer, plan: CudaPlan, selected_blocks: Tensor | None) -> list[Work]:
    """Of the parts that read the cache."""
    parts, work = plan.parts, []
    has_shared = parts.shared is not None and parts.shared.blocks.numel() > 0
    has_others = has_shared or plan.starts is not None or plan.selected is not None
    if parts.unique is not None and plan.unique is not None and parts.unique.num_rows:
        beside = plan.unique.order.shape[0] <= BALANCED * listed_pairs(layer, parts.shared)
        work.append(unique(layer, plan, beside, alone=not has_others))
    if has_shared and parts.shared is not None:
        work.append(shared(layer, plan, parts.shared, beside=bool(work)))
    if parts.selected is not None and plan.selected is not None:
        work.append(selected(layer, plan, parts.selected, plan.selected, selected_blocks))
    return work


def _too_large(layer: Layer, plan: CudaPlan) -> str | None:
    listed = listed_pairs(layer, plan.parts.shared)
    if listed > MOST_LISTED:
        return f"{listed} pairs of a tile of rows and a shared block, expected at most {MOST_LISTED}"
    chosen = plan.parts.selected
    if chosen is not None and chosen.max_rows * layer.group > LARGEST_SPAN:
        return f"spans of {chosen.max_rows} rows with {layer.group} heads each, expected at most {LARGEST_SPAN} in all"
    return None


def _tell(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        logger.warning("unified_attention: the CUDA kernels do not cover %s; the reference computes it, slower", reason)
