"""Runs samples through a model, densely and with each choice: one record for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.budget import Budget
from benchmarks.quality.methods import OBSERVED_ROWS, Compared, Observed
from benchmarks.quality.prompts import Place, SparsePrompt
from benchmarks.quality.samples import Sample
from benchmarks.sparse_rows import DecodedRows, Policy
from benchmarks.sparse_step import Step

DENSE = "dense"
Method = Compared | SparsePrompt


@dataclass(frozen=True)
class Key:
    """Names a sample by its origin, and the size of the blocks."""

    model: str
    task: str
    length: int
    seed: int
    number: int
    block_size: int


@dataclass(frozen=True)
class Record:
    """The outcome of a sample under one method. dense: ratio 1.

    score: the share of answers with every token right. nats: per token of the answers. same: the share of likeliest
    tokens that are dense attention's. read: the share of its context of which a row read keys and values, over layers
    that choose and KV heads.
    """

    key: Key
    method: str
    ratio: float
    score: float
    nats: float
    same: float
    read: float


@dataclass(frozen=True)
class DenseContext:
    """A sample's context, computed densely once for all methods and sizes of blocks.

    rows: the question's last token and the answers. dense: float32 [rows, vocabulary], their logits. observed: the
    attention of the question's end.
    """

    model: Any
    sample: Sample
    rows: DecodedRows
    dense: Tensor
    observed: Observed


def read_context(model: Any, sample: Sample) -> DenseContext:
    """Computes the context of a sample, which takes most of the time of a measurement."""
    rows = DecodedRows(model, sample.tokens[:-1], sample.first - OBSERVED_ROWS)
    observed: Observed = {}

    def observe(step: Step) -> None:
        few = Step(step.layer, step.query[:OBSERVED_ROWS], step.keys[: sample.first], step.contexts[:OBSERVED_ROWS],
                   step.scale, 1)  # fmt: skip
        observed[step.layer] = few.mass.mean(0)

    rows.logits(observe, 1)
    rows.advance(OBSERVED_ROWS - 1)
    return DenseContext(model, sample, rows, rows.logits(lambda step: None, 1), observed)


def measure_sample(
    context: DenseContext, key: Key, methods: Sequence[Method], budgets: Sequence[Budget]
) -> Iterator[Record]:
    """Yields the record of dense attention first. The context is dense; from the question's last token on, each row
    attends to the method's choice. After a sparse prompt these rows are dense. The answer is given token by token, so
    an error does not change what follows.
    """
    sample, rows = context.sample, context.rows
    expected = context.dense.argmax(-1)
    yield _record(key, DENSE, 1.0, context.dense, expected, sample, 1.0)
    for method in methods:
        for budget in budgets:
            read: list[float] = []
            if isinstance(method, SparsePrompt):
                place = Place(key.block_size, read)
                after = method.decoded(context.model, sample.tokens[:-1], sample.first - 1, budget, place)
                logits = after.logits(lambda step: None, key.block_size)
            else:
                logits = rows.logits(_policy(method, budget, context.observed, read), key.block_size)
            yield _record(key, method.name, budget.ratio, logits, expected, sample, sum(read) / len(read))


def _policy(method: Compared, budget: Budget, observed: Observed, read: list[float]) -> Policy:
    def policy(step: Step) -> Tensor:
        chosen = method.choose(step, budget, observed)
        # heads that share keys read what one of them needs
        of_keys = chosen.unflatten(0, (step.keys.shape[1], -1)).any(1) if chosen.dim() == 3 else chosen
        read.append(float((of_keys.sum(-1) / step.row_blocks).mean()))
        return chosen

    return policy


def _record(
    key: Key, method: str, ratio: float, logits: Tensor, expected: Tensor, sample: Sample, read: float
) -> Record:
    wanted, found = sample.tokens[sample.first :], logits.argmax(-1)
    nats = -logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    inside = torch.zeros(len(wanted), dtype=torch.bool)
    right = []
    for begin, end in sample.answers:
        tokens = slice(begin - sample.first, end - sample.first)
        inside[tokens] = True
        right.append(bool((found[tokens] == wanted[tokens]).all()))
    same = float((found == expected)[inside].float().mean())
    return Record(key, method, ratio, sum(right) / len(right), float(nats[inside].mean()), same, read)
