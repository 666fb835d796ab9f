"""Measures the effect of selecting blocks on the output: divergence from dense logits, and the share of right
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.retrieval.batch import make_batch
from benchmarks.retrieval.data import Task
from benchmarks.sparse_budget import Budget
from benchmarks.sparse_methods import Method, select
from benchmarks.sparse_rows import DecodedRows, Policy


def policy_of(method: Method, budget: Budget) -> Policy:
    """Every layer attends to the blocks that the method selects for it."""
    return lambda step: select(method.scores(step, budget), step, budget)


def everything(step: object) -> None:
    """The policy of dense attention."""
    return None


def divergence(dense: Tensor, sparse: Tensor) -> tuple[float, float]:
    """KL divergence in nats and share of equal greedy tokens, over the rows of logits `[rows, vocabulary]`."""
    expected, found = dense.log_softmax(-1), sparse.log_softmax(-1)
    nats = (expected.exp() * (expected - found)).sum(-1).mean()
    return float(nats), float((dense.argmax(-1) == sparse.argmax(-1)).float().mean())


@dataclass(frozen=True)
class Questions:
    """Sequences of the retrieval task whose questions are decoded, the records before them computed densely."""

    sequences: Sequence[tuple[DecodedRows, Tensor, Tensor]]

    @classmethod
    def make(cls, model: Any, task: Task, sequences: int, seed: int) -> Questions:
        """Computes the records of `sequences` sequences."""
        rng, made = np.random.default_rng(seed), []
        first = task.length - task.question_tokens
        for _ in range(sequences):
            batch = make_batch(task, 1, rng)
            made.append((DecodedRows(model, batch.tokens[0], first), batch.rows[0] - first, batch.answers[0]))
        return cls(made)

    def accuracy(self, policy: Policy, block_size: int) -> float:
        """Share of look-ups answered rightly: each is one decoded token."""
        right = [
            (rows.logits(policy, block_size)[asked].argmax(-1) == answers).float()
            for rows, asked, answers in self.sequences
        ]
        return float(torch.cat(right).mean())
