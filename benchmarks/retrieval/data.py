"""Sequences of the retrieval task, from a seed: records among filler, and at the end queries that follow them.

A record is `RECORD key value`. Every value is the key of another record, so that a query `QUERY key` is answered by a
chain of values, each found by the one before: one look-up per generated token. The records of a sequence form one
cycle, and the chains of its queries do not overlap, so that no answer can be copied from an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.retrieval.vocabulary import BEGIN, FIRST_FILLER, FIRST_SYMBOL, NUM_SYMBOLS, QUERY, RECORD, VOCABULARY

RECORD_TOKENS = 3


@dataclass(frozen=True)
class Task:
    """The length of a sequence and its questions: `queries` chains of `answers` look-ups over `records` records."""

    length: int
    records: int
    queries: int
    answers: int

    def __post_init__(self) -> None:
        asked, places = self.queries * self.answers, self.length - self.question_tokens - 1
        if not 0 < asked <= self.records <= NUM_SYMBOLS or places < self.records * RECORD_TOKENS:
            raise ValueError(
                f"{self}: needs at most {NUM_SYMBOLS} records, at most one asked look-up per record, and room for all"
            )

    @property
    def question_tokens(self) -> int:
        """Tokens of all queries and their answers, at the end of the sequence."""
        return self.queries * (self.answers + 2)


@dataclass(frozen=True)
class Sequence:
    """Tokens int64 `[length]`; rows int64 `[queries * answers]` whose next token is an answer; segment starts bool.

    A segment is a record, a query with its answers, or one filler token: positions may have gaps between segments, but
    not within one.
    """

    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.bool_]

    @property
    def answers(self) -> NDArray[np.int64]:
        """The token that belongs after each of `rows`."""
        return self.tokens[self.rows + 1]


def make_sequence(task: Task, rng: np.random.Generator) -> Sequence:
    """One sequence of the task. Filler tokens are independent and uniform; the records are anywhere among them."""
    cycle = FIRST_SYMBOL + rng.permutation(NUM_SYMBOLS)[: task.records]
    body, body_starts = _body(task, cycle, rng)
    questions, rows = _questions(task, cycle)
    starts = np.zeros(len(questions), dtype=bool)
    starts[:: task.answers + 2] = True
    first = 1 + len(body)
    return Sequence(
        np.concatenate([[BEGIN], body, questions]), first + rows, np.concatenate([[True], body_starts, starts])
    )


def spread_positions(starts: NDArray[np.bool_], span: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Positions of a sequence that reach up to `span`: random gaps, only at the start of a segment."""
    slack = max(0, span - len(starts))
    gaps = np.zeros(len(starts), dtype=np.int64)
    places = np.flatnonzero(starts)
    cuts = np.sort(rng.integers(0, slack + 1, size=len(places)))
    gaps[places] = np.diff(cuts, prepend=0)
    return np.arange(len(starts)) + np.cumsum(gaps)


def _body(
    task: Task, cycle: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Records and filler tokens in random order."""
    size = task.length - task.question_tokens - 1
    segments = size - task.records * (RECORD_TOKENS - 1)
    is_record = np.zeros(segments, dtype=bool)
    is_record[rng.permutation(segments)[: task.records]] = True
    widths = np.where(is_record, RECORD_TOKENS, 1)
    begins = np.cumsum(widths) - widths
    body = rng.integers(FIRST_FILLER, VOCABULARY, size=size)
    at, order = begins[is_record], rng.permutation(task.records)
    body[at], body[at + 1], body[at + 2] = RECORD, cycle[order], np.roll(cycle, -1)[order]
    starts = np.zeros(size, dtype=bool)
    starts[begins] = True
    return body, starts


def _questions(task: Task, cycle: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`QUERY key value value ...` of every query, and the rows (from the first of these tokens) that are asked."""
    width = task.answers + 2
    arcs = np.arange(task.queries)[:, None] * task.answers + np.arange(task.answers + 1)
    chains = cycle[arcs % task.records]
    tokens = np.concatenate([np.full((task.queries, 1), QUERY), chains], axis=1)
    rows = np.arange(task.queries)[:, None] * width + 1 + np.arange(task.answers)
    return tokens.reshape(-1), rows.reshape(-1)
