"""Warms graphs by running them: skeleton and prompt remainders before serving, the rest before or during it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.warm_up.agreement import ALONE, Agreement
from vllm_gaudi_ucm.graphs.warm_up.graph_memory import GIB, GraphMemory, fit_to_memory
from vllm_gaudi_ucm.graphs.warm_up.order import Skeleton
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.graphs.warm_up.records import (
    BucketKey,
    GraphKey,
    GraphRecord,
    GraphState,
    WarmUpProgress,
    WarmUpRecords,
    WarmUpStage,
    WarmUpSummary,
)


class GraphRuns(NamedTuple):
    """The functions that run graphs.

    forward: captures the graph of a shape and runs it, waits for it, and raises if another phase ran.
    logits: does the same for the logits graph of a number of rows, and for sampling.
    remainders, remainder: shapes of graphs for prompt remainders, if there are any, and the function that runs one.
    """

    forward: Callable[[ForwardShape], None]
    logits: Callable[[int], None]
    remainders: Sequence[RemainderShape] = ()
    remainder: Callable[[ForwardShape], None] | None = None


class WarmUp:
    """Runs graphs one after the other, measures time and memory of each, and marks those that are ready.

    For one thread at a time: `run_skeleton` first, then `run_all` or an `IdleWarmUp`.

    Args:
        ready: the buckets; their state changes as graphs become warm.
        free_memory: free bytes of the device; the difference over a run is the memory of its graph.
        report: called as graphs start and end.
        memory_budget: bytes for all graphs together; None: bounded by the memory of the device.
        agreement: the agreement of several workers, which all warm the same graphs. If a graph fails or does not fit on
            one worker, all drop it, so that they choose the same graph for a step.
    """

    def __init__(
        self,
        ready: ReadyBuckets,
        runs: GraphRuns,
        free_memory: Callable[[], int],
        report: Callable[[WarmUpProgress], None],
        memory_budget: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        agreement: Agreement = ALONE,
    ) -> None:
        self._agreement = agreement
        self.ready = ready
        self._run_forward, self._run_logits, self._remainders, self._run_remainder = runs
        self._free_memory = free_memory
        self._report_to = report
        self._memory_budget = memory_budget
        self._clock = clock
        self._records = WarmUpRecords((*ready.buckets.forward, *self._remainders, *ready.buckets.logits))
        self._executed: dict[GraphKey, int] = {}
        """Graphs that were compiled without executing and that `execute` has run since, with the bytes of each."""
        self._owed = 0
        """Expected bytes of the others when they first run."""

    def run_skeleton(self, skeleton: Skeleton, compile_only: bool = False) -> None:
        """Warms the graphs that serving starts with, then drops the buckets that do not fit into the remaining memory.

        Graphs for prompt remainders are among the first: there is no larger graph for a prompt remainder to run in. An
        error of a graph is not caught: a server whose first graphs do not run must not start.

        compile_only: running a graph executes nothing, and so takes no memory; `execute` measures, and drops.

        Raises:
            MemoryBudgetError: these graphs take more than `memory_budget`.
        """
        start = self._clock()
        keys = [*skeleton.keys, *self._remainders]
        self._records.begin_skeleton(keys)
        for key in keys:
            self._report("skeleton", current=key)
            self._settle("skeleton", self._agreed(self._run(key, compile_only)))
        self._records.skeleton_is_warm(self._clock() - start)
        if not compile_only:
            self._drop_what_does_not_fit()

    def execute(self, keys: Sequence[GraphKey]) -> None:
        """Runs graphs that were only compiled, and measures them; the memory of the others is predicted from these.

        The first call is for the skeleton, and drops graphs that do not fit in addition. A graph that has run is not
        measured again, because it already holds its memory.

        Raises:
            MemoryBudgetError: see `run_skeleton`.
        """
        of_skeleton = not self._executed
        for key in keys:
            if key not in self._executed:
                self._executed[key] = self._agreed(self._run(key)).size
        self._owed = 0
        for record in self.summary().records:
            if record.state is GraphState.WARM:
                self._records.add(replace(record, size=self._predicted(record.key)))
                self._owed += 0 if record.key in self._executed else self._predicted(record.key)
        if of_skeleton:
            self._drop_what_does_not_fit()

    def run_all(self, compile_only: bool = False) -> None:
        """Warms everything that is still cold. compile_only: see `run_skeleton`."""
        while (key := self.ready.next_cold()) is not None:
            self.warm(key, compile_only)

    def run_share(self, index: int, count: int, compile_only: bool = False) -> None:
        """Warms every `count`-th bucket from `index` on that is still cold, for engines that divide the work.

        All engines number the buckets alike, whatever is warm in each.
        """
        buckets = self.ready.buckets
        keys: list[BucketKey] = [*buckets.forward, *buckets.logits]
        for key in keys[index::count]:
            if key in self.ready.cold:
                self.warm(key, compile_only)

    def warm(self, key: BucketKey, compile_only: bool = False) -> None:
        """Warms one graph beyond the skeleton, or drops it: it does not fit the memory, or it raised an error.

        An error is reported and costs only this bucket: its steps keep running in a larger one.
        """
        self._report("rest", current=key)
        refused = self._refused(key)
        if self._agreement.all_of(refused is None):
            self._settle("rest", self._agreed(self._tried(key, compile_only)))
        else:
            other = GraphRecord(key, GraphState.DROPPED, reason="does not fit the memory of another worker")
            self._settle("rest", refused or other)

    def last_seconds(self, like: GraphKey) -> float:
        """The seconds of the last warm graph of the same kind (forward, prompt remainder or logits); 0 without any."""
        return self._records.last_seconds(like)

    def summary(self) -> WarmUpSummary:
        return self._records.summary()

    def _predicted(self, key: GraphKey) -> int:
        """Returns the bytes of a graph that was not measured, because it was only compiled."""
        if key in self._executed:
            return self._executed[key]
        if isinstance(key, RemainderShape):
            return max((size for other, size in self._executed.items() if isinstance(other, RemainderShape)), default=0)
        return GraphMemory(self._executed).bytes_of(key)

    def _run(self, key: GraphKey, compile_only: bool = False) -> GraphRecord:
        free, start = self._free_memory(), self._clock()
        if isinstance(key, RemainderShape):
            assert self._run_remainder is not None
            self._run_remainder(key.forward)
        elif isinstance(key, ForwardShape):
            self._run_forward(key)
        else:
            self._run_logits(key)
        seconds = self._clock() - start
        size = max(0, free - self._free_memory())
        if compile_only:
            size = self._predicted(key)
            self._owed += size
        return GraphRecord(key, GraphState.WARM, seconds, size)

    def _agreed(self, record: GraphRecord) -> GraphRecord:
        """Returns the common record: warm if it is warm on every worker, with the largest size of all workers."""
        is_warm, size = self._agreement.all_of(record.state is GraphState.WARM), self._agreement.most(record.size)
        if record.state is GraphState.WARM and not is_warm:
            return replace(record, state=GraphState.FAILED, size=0, reason="failed in another worker")
        return replace(record, size=size)

    def _tried(self, key: GraphKey, compile_only: bool = False) -> GraphRecord:
        start = self._clock()
        try:
            return self._run(key, compile_only)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return GraphRecord(key, GraphState.FAILED, self._clock() - start, reason=reason)

    def _refused(self, key: BucketKey) -> GraphRecord | None:
        """Returns a record with the reason if there is no memory for `key`, otherwise None.

        Checked again before each graph: `fit_to_memory` knew only the skeleton, and the device has other users.
        """
        measured = self._records.measured()
        expected, free = GraphMemory(measured).bytes_of(key), self._free_memory()
        used, budget = sum(measured.values()), self._memory_budget
        if budget is not None and used + expected > budget:
            why = f"ucm.graphs.memory_budget is {budget / GIB:.2f} GiB, of which {used / GIB:.2f} GiB are in use"
        elif expected > free - self._owed:
            why = f"{free / GIB:.2f} GiB are free on the device"
        else:
            return None
        return GraphRecord(key, GraphState.DROPPED, reason=f"about {expected / GIB:.3f} GiB do not fit: {why}")

    def _drop_what_does_not_fit(self) -> None:
        if self._memory_budget is None:
            return
        fit = fit_to_memory(self.ready.buckets, self._records.measured(), self._memory_budget)
        for key, reason in fit.dropped.items():
            self._settle("rest", GraphRecord(key, GraphState.DROPPED, reason=reason))

    def _settle(self, stage: WarmUpStage, record: GraphRecord) -> None:
        if isinstance(record.key, RemainderShape):
            pass  # steps find it by a look-up of their own
        elif record.state is GraphState.WARM:
            self.ready.mark_warm(record.key)
        else:
            self.ready.drop(record.key, record.reason)
        self._records.add(record)
        self._report(stage, ended=record)

    def _report(self, stage: WarmUpStage, current: GraphKey | None = None, ended: GraphRecord | None = None) -> None:
        self._report_to(self._records.progress(stage, self._free_memory(), current, ended))
