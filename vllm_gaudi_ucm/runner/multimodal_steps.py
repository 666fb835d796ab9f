"""The part of a worker that encodes the pictures of each step, and places their embeddings in its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.batch.embedding_rows import EmbeddingRows
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.multimodal.item_encoder import Item
from vllm_gaudi_ucm.protocol.attachments import attach_failures
from vllm_gaudi_ucm.runner.parts import WorkerPart

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.multimodal.item_encoder import ItemEncoder
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput

logger = plugin_logger(__name__)


class MultimodalSteps(WorkerPart):
    """Encodes what vLLM's scheduler orders, forgets what it frees, and writes the table rows of a step's pictures to the
    row input.

    A request whose picture cannot be encoded runs this step without it; its output says so, and our scheduler ends it
    with an error, without its tokens and its blocks.

    Args:
        requests: the live requests.
        encoder: has the embedding table.
    """

    def __init__(self, requests: RequestTable, encoder: ItemEncoder) -> None:
        self._requests = requests
        self._rows = requests.input_of(EmbeddingRows)
        self._encoder = encoder
        self._failures: dict[str, str] = {}

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        for key in scheduler_output.free_encoder_mm_hashes:
            self._encoder.table.free(key)

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        errors = self._encoder.encode(list(self._ordered(scheduler_output.scheduled_encoder_inputs)))
        for name, count in scheduler_output.num_scheduled_tokens.items():
            row = self._requests.requests[name].row
            first = int(self._requests.num_computed[row])
            for feature in self._rows.needed(row, first, first + count):
                rows = self._encoder.table.rows_of(feature.identifier)
                if rows is None:
                    self._fail(name, errors.get(feature.identifier))
                else:
                    self._rows.place(row, feature, rows)

    def _ordered(self, ordered: dict[str, list[int]]) -> list[Item]:
        found = []
        for name, numbers in ordered.items():
            features = self._rows.features(self._requests.requests[name].row)
            found += [Item(features[number].identifier, features[number]) for number in numbers]
        return found

    def before_output(self, step: ComputedStep, output: ModelRunnerOutput) -> None:
        mine = {one.request_id for one in step.requests}.intersection(self._failures)
        attach_failures(output, {name: self._failures.pop(name) for name in mine})

    def _fail(self, name: str, error: Exception | None) -> None:
        why = "its embeddings were not kept" if error is None else str(error)
        if name not in self._failures:
            logger.warning("Request %s ends: a picture cannot be encoded: %s", name, why)
        self._failures[name] = f"a picture cannot be encoded: {why}"
