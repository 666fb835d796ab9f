"""The choices that are compared, offline: what each row of a layer attends to, under one budget for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.quality.budget import Budget
from benchmarks.quality.peers import ExactTopK, Quest, StreamingLLM, quest_bound
from benchmarks.quality.scores import Scores, by_kv_head, of_method, of_summary, select
from benchmarks.sparse_step import Step
from vllm_gaudi_ucm.ops.block_selection.api import new_summaries, write_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode
from vllm_gaudi_ucm.sparse.methods.kvstar import KVStarOptions, KVStarState

OBSERVED_ROWS = 32
"""Last rows of a question, by whose attention SnapKV chooses."""
POOL = 3
DEFAULT, EXACT, CODES = "gsa", "exact", "gsa_codes"
WITH_A_GOAL, QUESTS = (DEFAULT, CODES), ("quest", "quest_heads")

Observed = dict[int, Tensor]
"""By layer, float32 [tokens]: the attention that the last rows of a question gave to each token before the answers."""
Choose = Callable[[Step, Budget, Observed], Tensor]
"""Returns bool [rows, blocks], or [heads, rows, blocks] if heads choose for themselves."""


@dataclass(frozen=True)
class Compared:
    """name: in tables. scored: for a block size, the bytes that are read to score a block, divided by the bytes of its
    keys and values. Both are bfloat16, heads have 64 elements.
    """

    name: str
    choose: Choose
    scored: Callable[[int], float]


def vectors(count: Callable[[int], float]) -> Callable[[int], float]:
    """Returns `scored` for a number of vectors that are as large as keys. count: by block size."""
    return lambda block_size: count(block_size) / (2 * block_size)


def quest_by_head(step: Step, budget: Budget) -> Tensor:
    """Quest as published: each query head chooses its own blocks."""
    kind = SummaryKind.MINMAX
    summaries = new_summaries(step.key_cache, kind)
    write_summaries(step.key_cache, torch.arange(1, step.num_blocks + 1), summaries, kind)
    heads = step.query.unflatten(1, (step.keys.shape[1], -1))
    bounds = torch.stack([quest_bound(row, summaries[1:]) for row in heads])  # [rows, blocks, kv heads, group]
    scores = bounds.flatten(2).movedim(2, 0)
    flat = replace(step, contexts=step.contexts.repeat(len(scores)))
    return select(scores.flatten(0, 1), flat, budget).view(scores.shape)


def snapkv(step: Step, budget: Budget, observed: Observed) -> Tensor:
    """Like SnapKV (Li et al., 2024): one choice for a whole answer, by the pooled attention of the question's end."""
    tokens = observed[step.layer]
    padded = torch.nn.functional.pad(tokens, (0, -len(tokens) % step.block_size))
    mass = padded.view(-1, step.block_size).sum(1)
    pooled = torch.nn.functional.max_pool1d(mass[None, None], POOL, 1, POOL // 2)[0, 0]
    scores = torch.nn.functional.pad(pooled, (0, step.num_blocks - len(pooled)))
    first = select(scores[None], replace(step, query=step.query[:1], contexts=step.contexts[:1]), budget)
    kept = first.expand(len(step.query), -1).clone()
    return kept | _later(step, 0)


def kvstar(scores: Scores) -> Choose:
    """KVStar with its default options over scores, by its own state machine."""
    options = KVStarOptions()

    def choose(step: Step, budget: Budget, observed: Observed) -> Tensor:
        fresh, later = select(scores(step, budget), step, budget), None
        chosen, locked = torch.empty_like(fresh), 0
        state = KVStarState("answer", options.checkpoint_interval, options.lock_duration)
        for row in range(len(fresh)):
            mode = state.next_step()
            if mode == SelectionMode.SELECT:
                state.lock(int(step.contexts[row]))
            differs = int((fresh[row] ^ fresh[locked]).sum()) > options.update_threshold
            if mode == SelectionMode.SELECT or (mode == SelectionMode.CHECK and differs):
                locked, later = row, _later(step, row)
            assert later is not None
            chosen[row] = fresh[locked] | later[row]
        return chosen

    return choose


def _later(step: Step, row: int) -> Tensor:
    """Bool [rows, blocks]: blocks that have begun since `row`, which are attended while its choice is kept."""
    number, begin = torch.arange(step.num_blocks), step.row_blocks[row]
    return (number >= begin - 1) & (number < step.row_blocks[:, None])


def compared() -> tuple[Compared, ...]:
    """Returns every method, the default first. Names that end in `_heads` choose for each KV head."""
    box_mean, minmax = of_summary(SummaryKind.BOX_MEAN), of_summary(SummaryKind.MINMAX)
    code, mean, codes = (of_summary(kind) for kind in (SummaryKind.HASH, SummaryKind.MEAN, SummaryKind.CODES))
    exact, quest = of_method(ExactTopK), of_method(Quest)

    def shared(scores: Scores) -> Choose:
        return lambda step, budget, observed: select(scores(step, budget), step, budget)

    def alone(choose: Callable[[Step, Budget], Tensor]) -> Choose:
        return lambda step, budget, observed: choose(step, budget)

    boxes, every = vectors(SummaryKind.BOX_MEAN.vectors), vectors(lambda block_size: block_size)
    one, two, none = vectors(lambda block_size: 1), vectors(lambda block_size: 2), vectors(lambda block_size: 0)
    # a code of 64 signs and a gain takes 9 bytes, a key 128
    few_codes = vectors(lambda block_size: SummaryKind.HASH.vectors(block_size) * 9 / 128)
    all_codes = vectors(lambda block_size: SummaryKind.CODES.vectors(block_size) * 9 / 128)
    return (
        Compared(DEFAULT, shared(box_mean), boxes),
        Compared("gsa_heads", alone(by_kv_head(box_mean)), boxes),
        Compared("gsa_fp8", shared(of_summary(SummaryKind.BOX_MEAN, narrow=True)), lambda size: boxes(size) / 2),
        Compared("gsa_hash", shared(code), few_codes),
        Compared("gsa_minmax", shared(minmax), two),
        Compared("gsa_mean", shared(mean), one),
        Compared(CODES, shared(codes), all_codes),
        Compared("kvstar", kvstar(box_mean), lambda size: boxes(size) / KVStarOptions().checkpoint_interval),
        Compared(EXACT, shared(exact), every),
        Compared("exact_heads", alone(by_kv_head(exact)), every),
        Compared("quest", alone(quest_by_head), two),
        Compared("quest_heads", alone(by_kv_head(quest)), two),
        Compared("quest_shared", shared(quest), two),
        Compared("snapkv", snapkv, none),
        Compared("streaming", shared(of_method(StreamingLLM)), none),
    )
