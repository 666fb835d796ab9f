"""Kernels of all graphs, compiled side by side before the first graph is captured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.kernel_report import kernel_report
from vllm_gaudi_ucm.ops.side_by_side import compiled_side_by_side

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution
    from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
    from vllm_gaudi_ucm.graphs.warm_up.agreement import Agreement

logger = plugin_logger(__name__)


class KernelCompilation(NamedTuple):
    """found: kernels of the graphs. compiled: those that no earlier start had left on disk."""

    found: int = 0
    compiled: int = 0
    seconds: float = 0.0

    def and_then(self, other: KernelCompilation) -> KernelCompilation:
        """Both, one after the other."""
        return KernelCompilation(self.found + other.found, self.compiled + other.compiled, self.seconds + other.seconds)


def compile_kernels(
    executions: Sequence[BucketedExecution],
    largest: Sequence[ForwardShape],
    others: Callable[[], Iterable[ForwardShape]],
    agreement: Agreement,
) -> KernelCompilation:
    """Compiles what graphs of these shapes launch, where a device has such kernels, and says how many there were.

    They are found by computing over pads; nothing that is computed may be read. On a first start that is done for
    `largest` and for `others`. Where an earlier start has left the kernels of `largest` on disk it has left the others,
    too, and reading one takes a few milliseconds: `others` are not computed.

    executions: of the model, and of a draft model.
    agreement: of all workers, because what is computed holds collectives.
    """
    if not all(execution.compiles_kernels for execution in executions):
        return KernelCompilation()
    found = _compile(executions, largest, remainders=False)
    if not agreement.all_of(not found.compiled):
        found = found.and_then(_compile(executions, others(), remainders=True))
    logger.info("%d kernels, %d of them compiled side by side and the others read from disk, in %.1f s", *found)
    return found


def _compile(
    executions: Sequence[BucketedExecution], shapes: Iterable[ForwardShape], remainders: bool
) -> KernelCompilation:
    start = time.perf_counter()
    with kernel_report(logger) as report, compiled_side_by_side(report) as found:
        for shape in shapes:
            for execution in executions:
                execution.compute_pads(shape)
        if remainders:
            executions[0].compute_remainders()
    return KernelCompilation(found.count, found.compiled, time.perf_counter() - start)
