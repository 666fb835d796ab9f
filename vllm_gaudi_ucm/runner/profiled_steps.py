"""Names the phases of steps in a profiler's trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.runner.parts import WorkerPart

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.execution import StepShape
    from vllm_gaudi_ucm.observability.step_profiler import StepProfiler
    from vllm_gaudi_ucm.runner.computed_step import ComputedStep, Division
    from vllm_gaudi_ucm.vllm_api.steps import SchedulerOutput


class ProfiledSteps(WorkerPart):
    """Makes each phase of a step a range of the trace: `plan`, `forward ...`, `logits`, `sample` and `finish`. An
    engine has this part only if `--profiler-config` is given.

    It is the last part, so that a phase ends after the other parts have acted.
    """

    def __init__(self, profiler: StepProfiler) -> None:
        self._profiler = profiler

    def before_step(self, scheduler_output: SchedulerOutput) -> None:
        self._profiler.begin_step()
        # other parts have waited for earlier steps
        self._begin("plan" if scheduler_output.total_num_scheduled_tokens else "step without tokens")

    def without_tokens(self, scheduler_output: SchedulerOutput, output: object) -> None:
        self._profiler.end_phase()

    def before_division(self, step: ComputedStep, division: Division) -> None:
        self._begin("plan")

    def before_forward(self, division: Division) -> None:
        if self._profiler.is_recording:
            self._profiler.begin_phase(forward_name(division.shape))

    def after_forward(self, division: Division) -> None:
        self._begin("logits")

    def after_divisions(self) -> None:
        self._profiler.end_phase()

    def before_sampling(self, step: ComputedStep) -> None:
        self._begin("sample")

    def after_sampling(self, step: ComputedStep, tokens: Callable[[], list[list[int]]]) -> None:
        self._begin("finish")

    def step_computed(self, step: ComputedStep) -> None:
        self._profiler.end_phase()

    def close(self) -> None:
        self._profiler.close()

    def _begin(self, name: str) -> None:
        if self._profiler.is_recording:
            self._profiler.begin_phase(name)


def forward_name(shape: StepShape) -> str:
    """Returns the name of a forward: its phase and sizes, as it runs. Sizes that are 0 are left out."""
    bucket = shape.padded
    sizes = {
        "q": bucket.query_len,
        "s": bucket.shared_blocks,
        "u": bucket.unique_blocks,
        "k": bucket.selected_blocks,
        "logits ": bucket.logits,
    }
    return " ".join([f"forward {bucket.phase}", *(f"{letter}{size}" for letter, size in sizes.items() if size)])
