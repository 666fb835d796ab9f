"""The shape and the attention work of a simulated step, by the same rule as the planner's, from block counts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, phase_string
from vllm_gaudi_ucm.observability.step_record import StepRecord


class Scheduled(NamedTuple):
    """A request of a step.

    request: the owner of this entry. prefix: which prefix its first `depth` blocks belong to.
    computed, new, tokens: tokens in the cache, tokens of this step, tokens known.
    """

    request: Any
    prefix: int
    depth: int
    computed: int
    new: int
    tokens: int


@dataclass(frozen=True)
class StepCounts:
    """The counts of a step in a phase log, without its times."""

    bucket: Bucket
    requests: int
    prompts: int
    causal_pairs: int
    shared_pairs: int
    unique_pairs: int

    def record(self, step: int, plan_ms: float, forward_ms: float, sample_ms: float) -> StepRecord:
        """The line of the log; the step ran in its true shape."""
        return StepRecord(
            step,
            self.bucket,
            self.bucket,
            self.requests,
            self.prompts,
            self.bucket.query_len,
            self.causal_pairs,
            self.shared_pairs,
            self.unique_pairs,
            plan_ms,
            forward_ms,
            sample_ms,
        )


@dataclass
class _PrefixUse:
    """Blocks of one prefix in use: by the deepest, the second deepest, and the deepest request of many rows.

    tokens: tokens of the deepest request's context that are in the prefix.
    """

    first: int = 0
    second: int = 0
    many: int = 0
    tokens: int = 0

    def add(self, depth: int, tokens: int, many_rows: bool) -> None:
        if many_rows:
            self.many = max(self.many, depth)
        self.first, self.second = max(self.first, depth), max(self.second, min(self.first, depth))
        self.tokens = max(self.tokens, tokens)

    @property
    def shared(self) -> int:
        """Leading blocks that more than one row uses; beyond them the deepest request is alone with one row."""
        return max(self.second, self.many)


def measure_step(batch: Sequence[Scheduled], block_size: int) -> StepCounts:
    """Classifies rows and blocks as `plan_batch` does.

    A request with one new token sees its context and that token in the cache, one with more sees its computed tokens;
    blocks that more than one row uses are shared.
    """
    uses: dict[int, _PrefixUse] = {}
    rows = prompts = logits = shared = unique = causal_pairs = context_pairs = unique_pairs = 0
    for entry in batch:
        many = entry.new > 1
        context = entry.computed if many else entry.computed + 1
        blocks = -(-context // block_size)
        depth = min(entry.depth, blocks)
        rows += entry.new
        logits += entry.computed + entry.new >= entry.tokens
        context_pairs += entry.new * context
        if many:
            prompts += 1
            causal_pairs += entry.new * (entry.new + 1) // 2
            shared += blocks - depth
        else:
            unique += blocks - depth
            unique_pairs += max(0, context - depth * block_size)
        if depth:
            uses.setdefault(entry.prefix, _PrefixUse()).add(depth, min(context, depth * block_size), many)
    for use in uses.values():
        shared += use.shared
        unique += use.first - use.shared
        unique_pairs += max(0, use.tokens - use.shared * block_size)
    phase = phase_string(prompts > 0, shared > 0, unique > 0)
    bucket = Bucket(phase, rows, shared, unique, logits)
    return StepCounts(bucket, len(batch), prompts, causal_pairs, context_pairs - unique_pairs, unique_pairs)
