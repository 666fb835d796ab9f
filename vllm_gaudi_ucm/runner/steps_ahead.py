"""Steps whose tokens the host has not read yet, while the next ones are planned: asynchronous scheduling."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_gaudi_ucm.device.step_activity import STEPS
from vllm_gaudi_ucm.vllm_api.steps import AsyncModelRunnerOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.observability.host_work import HostWork
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep
    from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
    from vllm_gaudi_ucm.sampling.tokens_in_flight import SampledTokens
    from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead
    from vllm_gaudi_ucm.vllm_api.steps import KVConnectorOutput, SchedulerOutput

REASON = "tokens of the step before"


Finish = Callable[["SampledTokens", float], ModelRunnerOutput]
"""Ends a step whose tokens the host has, after so many seconds of waiting for them; makes its output."""


class PendingTokens(Protocol):
    """Tokens of a step, on their way to the host."""

    @property
    def are_waited_for(self) -> bool:
        """Whether the host has yet to read them, which nobody has counted."""

    def wait(self) -> None:
        """Until they are there, in any thread; nothing learns them yet."""

    def settle(self) -> tuple[SampledTokens, float]:
        """The tokens, which the request table has learned, and the seconds that the host has waited for them."""


class VerifiedLater:
    """Tokens of a step that are sampled when they are read: how many of its drafts are right is for the host to say,
    and the next drafts are made of them. Until then the device has the forward to compute.

    Args:
        sample: called once; counts what it waits for.
    """

    are_waited_for = False

    def __init__(self, sample: Callable[[], SampledTokens]) -> None:
        self._sample = sample

    def wait(self) -> None:
        """Nothing is on its way yet."""

    def settle(self) -> tuple[SampledTokens, float]:
        began = time.perf_counter()
        sampled = self._sample()
        return sampled, time.perf_counter() - began


class StepOutput(AsyncModelRunnerOutput):
    """What a step gives, once its tokens have crossed; vLLM's engine asks for it when the next step is queued, in a
    process of the worker's own from another thread than the one that runs steps.

    Args:
        tokens: of the sampler's slots.
        finish: called once.
        read: called before the engine gets the output.
        step: what the output is of, with what a KV connector has reported for it.
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
        """Whether the step has ended."""
        return self._output is not None

    @property
    def waits(self) -> bool:
        """Whether the host has to wait for tokens of it, beside what is counted where it happens."""
        return self._tokens.are_waited_for

    def settle(self) -> float:
        """Waits for the tokens, which the request table learns, and ends the step. Returns the seconds of the wait."""
        if self._output is not None:
            return 0.0
        sampled, waited = self._tokens.settle()
        self._output = self._finish(sampled, self._waited + waited)
        return waited

    @torch.inference_mode()
    def get_output(self) -> ModelRunnerOutput:
        """Waits for the tokens; while another thread does, the next step is planned."""
        began = time.perf_counter()
        self._tokens.wait()
        self._waited = time.perf_counter() - began
        self._read(self)
        assert self._output is not None, "reading settles"
        return self._output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """Returns what the step's KV connector has reported. vLLM 0.33 asks for it after `get_output` has failed, so
        that finished loads and saves are not lost with the tokens."""
        return self._step.transferred


class StepsAhead:
    """The outputs that the engine has not asked for, oldest first: at most two, as long as the engine's queue.

    Tokens of the last step are stand-ins in the request table, which `carried` resolves on the device. All older ones
    are known before a step is planned.

    Args:
        table: of the requests.
        carried: the last sampled tokens on the device.
        host: counts what had to be waited for early.
        static: with static shapes, told when the engine has read every step.
        drafts: in an engine with drafts. The next step's rows follow from how many were right, so that it is scheduled
            while one runs, and planned when that one's tokens are read.
        asked: whether the engine asks this worker for outputs. Of several workers it asks one; another one lets go of
            a step once its tokens are there and the step after the next begins.
        is_apart: whether this worker has a process of its own.

    verifies_at_once: whether a step of an engine with drafts is sampled before its call returns: in a worker with a
        process of its own. The engine schedules meanwhile, and all workers come to the draft model's collectives at
        the same place, whether the engine asks them for outputs or not.
    lock: held by whoever runs a step or ends one. Engines with worker processes read outputs in a thread of their own.
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
        """Before the request table takes a step over."""
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
        """What no step waits for: now, or where one is about to begin, once the device has that one to compute."""
        if self._begins:
            self._later.append(work)
        else:
            work()

    def _tell(self) -> None:
        """A step has been queued, or has nothing to compute."""
        works, self._later = self._later, []
        for work in works:
            work()

    def add(self, tokens: PendingTokens, finish: Finish, computed: ComputedStep) -> StepOutput:
        """A step that has been queued. finish: see StepOutput; steps end in their order."""
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
        """All steps have: whoever waits for an idle device may begin."""
        if self._static is not None and self._static.follows_steps:
            self._static.end_step()
        STEPS.end()
