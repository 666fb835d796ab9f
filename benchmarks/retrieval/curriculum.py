"""The training data of the model: short sequences at positions from all over the range, then longer ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.retrieval.data import Task


@dataclass(frozen=True)
class Stage:
    """`steps` steps on batches of `sequences` sequences of `task`, at a learning rate that falls from first to last."""

    task: Task
    sequences: int
    steps: int
    first_rate: float
    last_rate: float

    def rate(self, step: int) -> float:
        """Learning rate of a step of this stage."""
        return self.first_rate + (self.last_rate - self.first_rate) * step / self.steps


CURRICULUM = (
    Stage(Task(length=128, records=16, queries=4, answers=4), 16, steps=1000, first_rate=1e-3, last_rate=1e-3),
    Stage(Task(length=512, records=64, queries=8, answers=8), 4, steps=600, first_rate=1e-3, last_rate=7e-4),
    Stage(Task(length=2048, records=192, queries=16, answers=8), 1, steps=400, first_rate=7e-4, last_rate=3e-4),
    Stage(Task(length=4096, records=320, queries=32, answers=8), 1, steps=50, first_rate=3e-4, last_rate=5e-5),
)
EVALUATED = (
    Task(length=512, records=64, queries=8, answers=8),
    Task(length=2048, records=192, queries=16, answers=8),
    Task(length=8192, records=384, queries=16, answers=8),
    Task(length=16384, records=384, queries=16, answers=8),
)


def plan(curriculum: tuple[Stage, ...]) -> Iterator[tuple[Stage, float]]:
    """Stage and learning rate of every step."""
    for stage in curriculum:
        for step in range(stage.steps):
            yield stage, stage.rate(step)
