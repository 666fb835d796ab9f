"""The demand of a traffic before any bucket is known: the points that a search covers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_gaudi_ucm_tools.vllm_gaudi.replay import decode_wanted, prefill_wanted
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Prefill, Step, Traffic, TrafficError

Sizes = dict[tuple[int, int], float]
# How much larger the steps are that `with_larger` adds.
LARGER = (1.25, 1.6, 2.0, 4.0)


@dataclass(frozen=True)
class Points:
    """Runs by size. singles: (query, context blocks). merged: (prompts, longest query). decodes: (requests, blocks),
    blocks without the blocks of drafts, or the highest one with contiguous reading.
    """

    singles: Sizes = field(default_factory=lambda: defaultdict(float))
    merged: Sizes = field(default_factory=lambda: defaultdict(float))
    decodes: Sizes = field(default_factory=lambda: defaultdict(float))

    def with_larger(self, share: float, settings: Settings) -> Points:
        """Returns the points with this share of their runs on larger ones, so that a busier hour has buckets, too."""
        if not share:
            return self
        tokens = min(settings.max_num_batched_tokens, settings.max_model_len)
        blocks = settings.blocks_per_request * settings.max_num_seqs
        return Points(
            _spread(self.singles, share, (tokens, settings.most_context)),
            dict(self.merged),
            _spread(self.decodes, share, (settings.max_num_seqs, blocks)),
        )


def _spread(sizes: Sizes, share: float, most: tuple[int, int]) -> Sizes:
    spread: Sizes = defaultdict(float)
    for (first, second), count in sizes.items():
        spread[first, second] += count * (1.0 - share)
        for factor in LARGER:
            larger = min(round(first * factor), max(first, most[0])), min(round(second * factor), max(second, most[1]))
            spread[larger] += count * share / len(LARGER)
    return spread


def points_of(traffic: Traffic, settings: Settings) -> Points:
    """Returns the points. Prompts merge by their true sizes; of several ranks the largest size counts."""
    points = Points()
    for ranks in traffic.steps:
        batches = [_merged(step.prefills, settings) for step in ranks]
        for number in range(max(map(len, batches))):
            shapes = [prefill_wanted(own[number], settings.block_size).shape for own in batches if len(own) > number]
            count, query, context = map(max, zip(*shapes, strict=True))
            if count == 1:
                points.singles[query, context] += 1
            else:
                points.merged[count, query] += 1
        if live := [step for step in ranks if step.decodes]:
            blocks = max(decode_wanted(step, True).shape[2] if settings.contiguous else step.blocks for step in live)
            points.decodes[max(step.decodes for step in live), blocks] += 1
    return points


def _merged(prefills: Sequence[Prefill], settings: Settings) -> list[list[Prefill]]:
    """Returns prompts in batches that are as large as they may be."""
    batches: list[list[Prefill]] = []
    for prefill in prefills:
        joined = [*batches[-1], prefill] if batches else [prefill]
        longest = max(other.query for other in joined)
        fits = len(joined) <= settings.prefill_batch and len(joined) * longest <= settings.max_num_batched_tokens
        if len(joined) > 1 and fits and not settings.hybrid_chunk and not any(other.computed for other in joined):
            batches[-1] = joined
        else:
            batches.append([prefill])
    return batches


def check_traffic(traffic: Traffic, settings: Settings) -> None:
    """Raises TrafficError if there are no steps, or if one cannot be a step of this server."""
    if not traffic.steps:
        raise TrafficError(f"{traffic.source}: holds no steps to choose buckets for")
    for number, ranks in enumerate(traffic.steps, 1):
        if len(ranks) != settings.ranks:
            raise TrafficError(f"{traffic.source}: step {number} has {len(ranks)} ranks, expected {settings.ranks}")
        for step in ranks:
            if why := _why_not(step, settings):
                raise TrafficError(
                    f"{traffic.source}: step {number} has {why}; give the limits of the server that wrote the log"
                )


def _why_not(step: Step, settings: Settings) -> str | None:
    """Returns what a server with these limits cannot do; None for a possible step."""
    if step.decodes > settings.max_num_seqs:
        return f"{step.decodes} decodes, more than --max-num-seqs {settings.max_num_seqs}"
    if step.decodes and not step.decodes <= step.blocks <= step.decodes * (settings.blocks_per_request + 1):
        return f"{step.decodes} decodes with {step.blocks} blocks, not possible with {settings.blocks_per_request} each"
    if step.highest > settings.num_blocks:
        return f"block {step.highest - 1}, and --num-blocks is {settings.num_blocks}"
    for prefill in step.prefills:
        if not 0 < prefill.query <= settings.max_num_batched_tokens:
            return (
                f"a prompt of {prefill.query} tokens, and --max-num-batched-tokens is {settings.max_num_batched_tokens}"
            )
        if not 0 <= prefill.computed <= settings.max_model_len - prefill.query:
            tokens = prefill.computed + prefill.query
            return f"a request of {tokens} tokens, and --max-model-len is {settings.max_model_len}"
    return None
