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

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.chosen_tiles import chosen_tiles
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.latent import attend_latent, why_not_latent
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.layer import Layer, why_not
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.merge import merge, saved_sums
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.own import divide, own, own_and_chosen, selected_with_own
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.parts import (
    BALANCED,
    MOST_LISTED,
    causal,
    listed_pairs,
    selected,
    shared,
    unique,
    unique_and_selected,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.plan import CudaPlan
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.windows import (
    by_request,
    fits_one_launch,
    one_launch,
    takes_requests,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda.work import Found, Work, run_side_by_side
from vllm_gaudi_ucm.ops.unified_attention.parts import NOTHING_SEEN, SharedPart
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead

LOG2_E = math.log2(math.e)

logger = logging.getLogger(__name__)
_told: set[str] = set()

# From this many rows, the causal part starts from the partial results of own blocks, instead of merging both (H200, 8
# chunks of 256 after 4096 tokens 0.53 -> 0.365 ms). Fewer rows have many pieces each, which it reads one by one.
CONTINUED = 512
# Rows times query heads of a kv head that one program holds: at most a verification of many drafts.
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
    per_head: PerHead = NOTHING_PER_HEAD,
    log_sums: Tensor | None = None,
) -> bool:
    """Writes the attention of one layer to `out`. Returns False, and logs it once, if the kernels do not cover it.

    selected_blocks: int64 [selected], blocks of this layer instead of those in the plan's selected part.
    log_sums: fp32 [rows, heads], also written.
    """
    cap = (spec.logits_soft_cap or 0.0) * LOG2_E
    tensors, scale, positions = (
        (query, key, value, key_cache, value_cache, out),
        spec.scale * LOG2_E,
        plan.parts.positions,
    )
    layer = Layer(*tensors, scale, cap, per_head.sinks, per_head.slopes, positions)
    if not layer.rows:
        return True
    latent = spec.values_in_keys and layer.value_dim < query.shape[2]
    reason = why_not_latent(layer, plan) if latent else why_not(layer) or _too_large(layer, plan)
    if reason is not None:
        _tell(reason)
        return False
    if latent:
        attend_latent(layer, plan, selected_blocks, log_sums)
        return True
    if log_sums is not None:
        return _new_tokens(layer, plan, log_sums)
    if plan.parts.shared is not None and fits_one_launch(layer, plan):
        one_launch(layer, plan, plan.parts.shared).launch()
        return True
    work = _work(layer, plan, selected_blocks)
    found = [one.found for one in work if one.found is not None]
    before = next((one for one in work if layer.rows >= CONTINUED and one.found and one.found.part == "own"), None)
    if plan.starts is not None and before is not None:
        others = [one for one in found if one is not before.found]
        work[work.index(before)] = _one_after_the_other(before, causal(layer, plan, plan.starts, others, before.found))
    elif plan.starts is not None:
        work.append(causal(layer, plan, plan.starts, found)._replace(small=layer.rows < CONTINUED))
    if not work:
        out.zero_()
        return True
    run_side_by_side(work, query.device)
    if found:
        merge(layer, plan, found, alone=len(work) == 1, continued=before is not None)
    return True


def _new_tokens(layer: Layer, plan: CudaPlan, log_sums: Tensor) -> bool:
    """Computes new tokens among themselves, with the logarithms of their sums. False if the step has other parts,
    too.
    """
    parts = plan.parts
    if plan.starts is None or (parts.shared, parts.unique, parts.selected) != (None, None, None):
        return False
    starts, (rows, heads) = plan.starts, layer.query.shape[:2]
    # as if every row had more parts, so that its sums are kept
    every = plan.kept(("every row", rows), lambda: _every_row(starts))
    kept = saved_sums(layer, plan, [every])
    assert kept is not None, "rows have more parts"
    causal(layer, plan, starts, [every]).launch()
    sizes = zip(kept, (layer.value_dim, 1, 1), strict=True)
    acc, top, total = (one[: rows * heads * size].view(rows, heads, size) for one, size in sizes)
    active = (starts <= every.place)[:, None, None]
    layer.out.copy_(torch.where(active, acc / total, 0.0))
    log_sums.copy_(torch.where(active, (top + total.log2()) * math.log(2), NOTHING_SEEN)[..., 0])
    return True


def _every_row(starts: Tensor) -> Found:
    row = torch.arange(starts.shape[0], dtype=torch.int32, device=starts.device)
    return Found("every", row, starts, starts, starts, starts, 1, 1)


def _one_after_the_other(first: Work, second: Work) -> Work:
    def launch() -> None:
        first.launch()
        second.launch()

    return Work(launch, first.found)


def _work(layer: Layer, plan: CudaPlan, selected_blocks: Tensor | None) -> list[Work]:
    """Returns the launches of the parts that read the cache."""
    parts, work = plan.parts, []
    has_shared = parts.shared is not None and parts.shared.blocks.numel() > 0
    has_others = has_shared or plan.starts is not None or parts.selected is not None
    if plan.joined:
        work.append(unique_and_selected(layer, plan, selected_blocks))
    elif parts.unique is not None and plan.unique is not None and parts.unique.num_rows:
        beside = plan.unique.order.shape[0] <= BALANCED * listed_pairs(layer, parts.shared)
        work.append(unique(layer, plan, beside, alone=not has_others))
    if plan.joined_own:
        work.append(selected_with_own(layer, plan, selected_blocks))
    if has_shared and parts.shared is not None:
        work += _shared(layer, plan, parts.shared, beside=bool(work))
    if parts.selected is not None and plan.selected is not None:
        if parts.selected.max_rows * layer.group > LARGEST_SPAN:
            work.append(chosen_tiles(layer, plan, parts.selected, selected_blocks))
        else:
            work.append(selected(layer, plan, parts.selected, plan.selected, selected_blocks))
    return work


def _shared(layer: Layer, plan: CudaPlan, part: SharedPart, beside: bool) -> list[Work]:
    """Returns the launches of the shared part. Only a request with several rows, which has a causal part, has blocks of
    its own there.

    Under a window its rows see different tokens, and under slopes at different distances, which only the tiles of the
    shared part support.
    """
    reads_tiles = part.rise is not None and not takes_requests(layer, part)
    if plan.starts is None or layer.slopes is not None or reads_tiles:
        return [shared(layer, plan, part, beside)]
    if plan.joined_own:
        division = own_and_chosen(plan).division
    else:
        division = plan.kept(("division", 0), lambda: divide(part, plan.block_size))
    if part.rise is not None:
        return [by_request(layer, plan, part, division), shared(layer, plan, division.common, beside)]
    return [own(layer, plan, part, division), shared(layer, plan, division.common, beside)]


def _too_large(layer: Layer, plan: CudaPlan) -> str | None:
    listed = listed_pairs(layer, plan.parts.shared)
    if listed > MOST_LISTED:
        return f"{listed} pairs of a tile of rows and a shared block, expected at most {MOST_LISTED}"
    chosen = plan.parts.selected
    in_tiles = not plan.joined_own and layer.slopes is None
    if chosen is not None and chosen.max_rows * layer.group > LARGEST_SPAN and not in_tiles:
        return f"spans of {chosen.max_rows} rows with {layer.group} heads each, expected at most {LARGEST_SPAN} in all"
    return None


def _tell(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        logger.warning("unified_attention: the CUDA kernels do not cover %s; the reference computes it, slower", reason)
