"""Async scheduling: the next steps are planned before the host has read the tokens of earlier ones."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_gaudi_ucm.device.step_activity import STEPS
from vllm_gaudi_ucm.vllm_api.steps import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.observability.host_work import HostWork
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep
    from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
    from vllm_gaudi_ucm.sampling.tokens_in_flight import SampledTokens
    from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead

REASON = "tokens of the step before"


Finish = Callable[["SampledTokens", float], ModelRunnerOutput]
"""Ends a step whose tokens have reached the host, given the seconds of waiting for them; returns its output."""


class PendingTokens(Protocol):
    """Tokens of a step that are being copied to the host."""

    @property
    def are_waited_for(self) -> bool:
        """Returns whether the host still has to read them, and the wait is not counted yet."""

    def wait(self) -> None:
        """Waits for the tokens, in any thread; does not update the request table."""

    def settle(self) -> tuple[SampledTokens, float]:
        """Writes the tokens to the request table; returns them, and the seconds that the host has waited for them."""


class VerifiedLater:
    """Tokens of a step that are sampled when they are read: the host decides how many of its drafts are accepted, and
    the next drafts depend on that. Until then the device computes the forward.

    Args:
        sample: called once; counts its own waits.
    """

    are_waited_for = False

    def __init__(self, sample: Callable[[], SampledTokens]) -> None:
        self._sample = sample

    def wait(self) -> None:
        """Does nothing, because no copy has begun."""

    def settle(self) -> tuple[SampledTokens, float]:
        began = time.perf_counter()
        sampled = self._sample()
        return sampled, time.perf_counter() - began


class StepOutput(AsyncModelRunnerOutput):
    """The output of a step, complete once its tokens have reached the host. vLLM's engine requests it when the next
    step is queued; in a worker process it does so from another thread than the one that runs steps.

    Args:
        finish: ends the step; called once.
        read: called before the engine gets the output.
        step: the step of the output, with the report of a KV connector.
    """

    def __init__(
        self,
        tokens: PendingTokens,
        finish: Finish,
        read: Callable[[StepOutput], None],
        step: ComputedStep,
    ) -> None:
        self._tokens = tokens
        self._finish = finish
        self._read = read
        self._step = step
        self._output: ModelRunnerOutput | None = None
        self._waited = 0.0

    @property
    def is_settled(self) -> bool:
        return self._output is not None

    @property
    def waits(self) -> bool:
        """Returns whether the host has to wait for its tokens, apart from waits that are counted where they occur."""
        return self._tokens.are_waited_for

    def settle(self) -> float:
        """Waits for the tokens, writes them to the request table, and ends the step. Returns the seconds waited."""
        if self._output is not None:
            return 0.0
        sampled, waited = self._tokens.settle()
        self._output = self._finish(sampled, self._waited + waited)
        return waited

    @torch.inference_mode()
    def get_output(self) -> ModelRunnerOutput:
        """Waits for the tokens, while another thread may plan the next step, and returns the output."""
        began = time.perf_counter()
        self._tokens.wait()
        self._waited = time.perf_counter() - began
        self._read(self)
        assert self._output is not None, "reading settles"
        return self._output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Returns the report of the step's KV connector. vLLM 0.33 calls this after `get_output` has failed, so that
        finished loads and saves are not lost with the tokens.
        """
        return self._step.transferred


class StepsAhead:
    """The outputs that the engine has not requested yet, oldest first: at most two, the length of the engine's queue.

    Tokens of the last step are placeholders in the request table, which `carried` resolves on the device. All older
    tokens are known before a step is planned.

    Args:
        carried: the last sampled tokens on the device.
        static: static shapes, notified when the engine has read every step.
        drafts: drafts of an engine with speculative decoding. The next step's rows depend on the number of accepted
            drafts, so that it is scheduled while a step runs, and planned when the tokens of that step are read.
        asked: whether the engine requests outputs from this worker. It does so from only one of several workers; the
            others drop a step once its tokens have arrived and the step after the next begins.
        is_apart: whether this worker has its own process.

    verifies_at_once: whether a step of an engine with drafts is sampled before its call returns: in a worker process.
        The engine schedules in the meantime, and all workers reach the draft model's collectives at the same point,
        whether or not the engine requests their outputs.
    lock: held while a thread runs or ends a step. Engines with worker processes read outputs in a separate thread.
    """

    def __init__(
        self,
        table: RequestTable,
        carried: CarriedTokens,
        host: HostWork,
        static: StaticShapes | None = None,
        drafts: DraftsAhead | None = None,
        asked: bool = True,
        is_apart: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        self.carried = carried
        self.drafts = drafts
        self.verifies_at_once = drafts is not None and is_apart
        self._table = table
        self._host = host
        self._static = static
        self._asked = asked
        self._outputs: deque[StepOutput] = deque()
        self._begins = False
        self._later: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Settles earlier steps as needed, before the request table is updated for a step."""
        last = not self._asked and not scheduler_output.total_num_scheduled_tokens
        self._begins = True
        try:
            if last or self.drafts is not None or self._table.sends_again(scheduler_output):
                self.settle()
            elif len(self._outputs) > 1:
                self._settle(list(self._outputs)[:-1])
        finally:
            self._begins = False
        if not scheduler_output.total_num_scheduled_tokens:
            self._tell()
        while not self._asked and self._outputs and self._outputs[0].is_settled:
            self._outputs.popleft()

    def settle(self) -> float:
        """Waits for the tokens of all steps. Returns the seconds of the wait."""
        return self._settle(list(self._outputs))

    def later(self, work: Callable[[], None]) -> None:
        """Does work that no step waits for: now, or once the device has the step that is about to begin."""
        if self._begins:
            self._later.append(work)
        else:
            work()

    def _tell(self) -> None:
        """Does the deferred work, because a step has been queued, or has nothing to compute."""
        works, self._later = self._later, []
        for work in works:
            work()

    def add(self, tokens: PendingTokens, finish: Finish, computed: ComputedStep) -> StepOutput:
        """Adds a queued step, and returns its output. finish: see StepOutput; steps end in order."""
        step = StepOutput(tokens, finish, self._read, computed)
        self._outputs.append(step)
        self._tell()
        return step

    def _settle(self, outputs: list[StepOutput]) -> float:
        if any(output.waits for output in outputs):
            self._host.waited(REASON)
        return sum(output.settle() for output in outputs)

    def _read(self, step: StepOutput) -> None:
        with self.lock:
            self._tell()
            while self._outputs:
                oldest = self._outputs.popleft()
                oldest.settle()
                if oldest is step:
                    break
            if not self._outputs:
                self._end()

    def _end(self) -> None:
        """Marks all steps as ended, so that work that needs an idle device may begin."""
        if self._static is not None and self._static.follows_steps:
            self._static.end_step()
        STEPS.end()
