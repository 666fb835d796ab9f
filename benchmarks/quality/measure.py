"""Runs samples through a model, densely and with each choice, and keeps one record for each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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


def measure_sample(
    model: Any, key: Key, sample: Sample, methods: Sequence[Method], budgets: Sequence[Budget]
) -> Iterator[Record]:
    """Yields the record of dense attention first. The context is dense; from the question's last token on, each row
    attends to the method's choice. After a sparse prompt these rows are dense. The answer is given token by token, so
    an error does not change what follows.
    """
    first = sample.first - OBSERVED_ROWS
    rows = DecodedRows(model, sample.tokens[:-1], first)
    observed: Observed = {}

    def observe(step: Step) -> None:
        few = Step(step.layer, step.query[:OBSERVED_ROWS], step.keys[: sample.first], step.contexts[:OBSERVED_ROWS],
                   step.scale, step.block_size)  # fmt: skip
        observed[step.layer] = few.mass.mean(0)

    rows.logits(observe, key.block_size)
    rows.advance(OBSERVED_ROWS - 1)
    dense = rows.logits(lambda step: None, key.block_size)
    expected = dense.argmax(-1)
    yield _record(key, DENSE, 1.0, dense, expected, sample, 1.0)
    for method in methods:
        for budget in budgets:
            read: list[float] = []
            if isinstance(method, SparsePrompt):
                place = Place(key.block_size, read)
                after = method.decoded(model, sample.tokens[:-1], sample.first - 1, budget, place)
                logits = after.logits(lambda step: None, key.block_size)
            else:
                logits = rows.logits(_policy(method, budget, observed, read), key.block_size)
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


class Journal:
    """A file of records, one JSON object a line. A run that was stopped goes on after the last whole sample.

    Args:
        path: is made with its folder if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records = list(read_records([path])) if path.exists() else []

    def missing(self, key: Key, methods: Sequence[Method], budgets: Sequence[Budget]) -> list[Method]:
        """Returns the methods without a record of this sample at some budget; all of them without a dense record."""
        done = {(record.method, record.ratio) for record in self.records if record.key == key}
        if (DENSE, 1.0) not in done:
            return list(methods)
        return [one for one in methods if any((one.name, budget.ratio) not in done for budget in budgets)]

    def has_dense(self, key: Key) -> bool:
        return any(record.key == key and record.method == DENSE for record in self.records)

    def add(self, records: Iterable[Record]) -> None:
        """Appends a sample's records in one write."""
        made = list(records)
        # a line that was cut off must not take the next one with it
        cut = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * cut + "".join(json.dumps(asdict(record)) + "\n" for record in made))
        self.records += made


def read_records(paths: Iterable[Path]) -> Iterator[Record]:
    """Yields the records of several files, each once: the last line counts. A line that was cut off is skipped."""
    found: dict[tuple[Key, str, float], Record] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:
                continue
            record = Record(Key(**fields.pop("key")), **fields)
            found[record.key, record.method, record.ratio] = record
    yield from found.values()
