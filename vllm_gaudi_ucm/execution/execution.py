"""The interface that computes a planned step: at its true shape, or padded to a bucket and replayed as a graph."""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.batch_plan import NO_REMAINDERS, BatchInput
from vllm_gaudi_ucm.batch.planned_step import PlannedStep
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket


class StepShape(NamedTuple):
    """The true shape of a step, and the shape in which it runs.

    remainder: whether it runs in a graph for prompt remainders, not in a bucket.
    chosen: most tokens that each row attended to, because rows chose them by themselves (DSA); 0 in a dense step.
    """

    true: Bucket
    padded: Bucket
    remainder: bool = False
    chosen: int = 0


class Execution(Protocol):
    """Computes one step at a time: stage, forward, then its logits as often as needed."""

    def divide(self, batch: BatchInput, remainders: NDArray[np.int64] = NO_REMAINDERS) -> list[NDArray[np.int64]]:
        """Returns the indices of requests that run together: one group, or more if no shape holds the whole step.

        remainders: int64 [n], requests whose rows choose together and are too many for an ordinary graph.
        """

    def stage(self, step: PlannedStep) -> StepShape:
        """Copies a step to the device."""

    def forward(self) -> None:
        """Computes the hidden states of all rows of the staged step, and writes their K/V."""

    def follow(self) -> None:
        """Takes part in a forward of other engines, which share out experts with this one. Stages no step, and
        overwrites only results that `logits` and `likeliest` returned for the previous step.
        """

    def logits(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """Returns float32 [at least len(rows), vocabulary]: logits of these rows of the step; further rows are garbage.

        Valid until the next call. Takes at most `max_logits` rows.
        """

    def likeliest(self, rows: NDArray[np.int64]) -> torch.Tensor | None:
        """Returns int64 [at least len(rows)], the argmax token after each of these rows; if None, `logits` must be
        used.

        Further entries are garbage. Takes more rows than `logits` if requests verify drafts.
        """

    def hidden_states(self, count: int) -> torch.Tensor:
        """Returns [at least count, hidden size]: the hidden states of the first rows of the step; further rows are
        garbage. Valid until the next step.
        """

    @property
    def max_logits(self) -> int: ...
