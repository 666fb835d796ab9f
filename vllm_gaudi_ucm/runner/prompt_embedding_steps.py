"""The part of a worker that gives the rows of a step the embeddings that requests have in their prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gaudi_ucm.batch.embedding_rows import EmbeddingRows
from vllm_gaudi_ucm.runner.parts import WorkerPart

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.multimodal.embedding_table import EmbeddingTable
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class _Chunk(NamedTuple):
    """Embeddings of a request in a step, [n, width], at positions int64 [n]. row: of the request table."""

    row: int
    places: NDArray[np.int64]
    embeddings: torch.Tensor


class PromptEmbeddingSteps(WorkerPart):
    """Copies the embeddings of a step's rows to the table, and writes their table rows to the row input. The table has
    a row for each token of the largest step, and is filled anew by each step that needs it.

    Args:
        requests: the live requests.
        table: has nothing else.
        whole: copy all rows of the table, so that all copies have one shape.
    """

    def __init__(self, requests: RequestTable, table: EmbeddingTable, *, whole: bool) -> None:
        self._requests = requests
        self._rows = requests.input_of(EmbeddingRows)
        self._table = table
        self._whole = whole
        self._host = torch.zeros(table.values.shape, dtype=table.values.dtype)

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        used = 1
        for row, places, embeddings in self._chunks(scheduler_output.num_scheduled_tokens):
            end = used + len(places)
            self._host[used:end] = embeddings
            self._rows.place_prompt(row, places, np.arange(used, end, dtype=np.int32))
            used = end
        if used > 1:
            self._table.fill(self._host if self._whole else self._host[:used])

    def _chunks(self, num_scheduled_tokens: dict[str, int]) -> Iterator[_Chunk]:
        for name, count in num_scheduled_tokens.items():
            row = self._requests.requests[name].row
            prompt = self._rows.prompt(row)
            if prompt is not None:
                first = int(self._requests.num_computed[row])
                places = prompt.places(first, first + count)
                if len(places):
                    yield _Chunk(row, places, prompt.embeddings[torch.from_numpy(places)])
