"""The part of a worker that encodes the pictures of each step, and places their embeddings in its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.batch.embedding_rows import EmbeddingRows
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.protocol.attachments import attach_failures, items_of
from vllm_gaudi_ucm.runner.parts import WorkerPart
from vllm_gaudi_ucm.vllm_api.steps import encoder_input_updates

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.multimodal.item_encoder import ItemEncoder
    from vllm_gaudi_ucm.observability.step_clock import StepClock
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep
    from vllm_gaudi_ucm.vllm_api.multimodal import MultiModalFeatureSpec
    from vllm_gaudi_ucm.vllm_api.steps import ModelRunnerOutput, SchedulerOutput

logger = plugin_logger(__name__)


class NeededItem(NamedTuple):
    """A picture that has rows in a step. row: of its request, in the request table."""

    request_id: str
    row: int
    feature: MultiModalFeatureSpec


class MultimodalSteps(WorkerPart):
    """Encodes what vLLM's scheduler orders, forgets what it frees, and writes the table rows of a step's pictures to
    the row input.

    A request whose picture cannot be encoded runs this step without it; its output says so, and our scheduler ends it
    with an error, without its tokens and its blocks.

    Args:
        requests: the live requests.
        encoder: has the embedding table.
        bypassed: counts pictures of a size that was not warmed.
    """

    def __init__(self, requests: RequestTable, encoder: ItemEncoder, bypassed: Callable[[str], None]) -> None:
        self._requests = requests
        self._rows = requests.input_of(EmbeddingRows)
        self._encoder = encoder
        self._bypassed = bypassed
        self._failures: dict[str, str] = {}

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        for key in scheduler_output.free_encoder_mm_hashes:
            self._encoder.table.free(key)

    def requests_updated(self, scheduler_output: SchedulerOutput, clock: StepClock) -> None:
        for name, sent_again in items_of(scheduler_output).items():
            self._rows.features(self._requests.requests[name].row).update(sent_again)
        for name, updates in encoder_input_updates(scheduler_output).items():
            features = self._rows.features(self._requests.requests[name].row)
            features.update({number: replace(features[number], data=data) for number, data in updates.items()})
        needed = list(self._needed(scheduler_output.num_scheduled_tokens))
        ordered = [
            self._rows.features(self._requests.requests[name].row)[number]
            for name, numbers in scheduler_output.scheduled_encoder_inputs.items()
            for number in numbers
        ]
        # the table is empty after a reload of weights, and the scheduler does not order what it believes to be there
        errors = self._encoder.encode([*ordered, *(one.feature for one in needed)])
        for _ in self._encoder.take_new_sizes():
            self._bypassed("picture of a size that the warm-up did not have")
        for name, row, feature in needed:
            rows = self._encoder.table.rows_of(feature.identifier)
            if rows is None:
                self._fail(name, errors[feature.identifier])
            else:
                self._rows.place(row, feature, rows)

    def _needed(self, num_scheduled_tokens: dict[str, int]) -> Iterator[NeededItem]:
        """Yields the pictures that have rows in the step."""
        for name, count in num_scheduled_tokens.items():
            row = self._requests.requests[name].row
            first = int(self._requests.num_computed[row])
            for feature in self._rows.needed(row, first, first + count):
                yield NeededItem(name, row, feature)

    def before_output(self, step: ComputedStep, output: ModelRunnerOutput) -> None:
        mine = {one.request_id for one in step.requests}.intersection(self._failures)
        attach_failures(output, {name: self._failures.pop(name) for name in mine})

    def _fail(self, name: str, error: Exception) -> None:
        if name not in self._failures:
            logger.warning("Request %s ends: a picture cannot be encoded: %s", name, error)
        self._failures[name] = f"a picture cannot be encoded: {error}"
