"""The parts of an engine with static shapes besides its model: buckets, graphs, their warm-up, and its counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.decisions.recipe_cache import log_cache_hits
from vllm_gaudi_ucm.execution.bucketed_execution import BucketedExecution, Capture
from vllm_gaudi_ucm.execution.divided_logits import DividedLogits
from vllm_gaudi_ucm.execution.graph_manager import Stage, uncompiled
from vllm_gaudi_ucm.execution.recipe_stages import RecipeStages
from vllm_gaudi_ucm.graphs.runners.maker import runner_maker
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.warm_up.extremes import extremes
from vllm_gaudi_ucm.graphs.warm_up.idle_warm_up import IdleWarmUp
from vllm_gaudi_ucm.graphs.warm_up.order import choose_skeleton
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.graphs.warm_up.records import BucketKey, GraphState, WarmUpProgress, WarmUpSummary
from vllm_gaudi_ucm.graphs.warm_up.warm_up import GraphRuns, WarmUp
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.warm_up_report import WarmUpReport, summary_line, warm_up_text
from vllm_gaudi_ucm.ops.unified_attention.api import choose_static_implementation
from vllm_gaudi_ucm.protocol.warm_up_orders import WarmUpState
from vllm_gaudi_ucm.sampling.static_sampling import StaticSampler
from vllm_gaudi_ucm.speculation.draft_model import DraftModelGraphs

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.graphs.lookup import BucketSet
    from vllm_gaudi_ucm.graphs.shapes.steps import Steps
    from vllm_gaudi_ucm.runner.loaded_model import AllocatedModel
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker

logger = plugin_logger(__name__)

# Outside the layers: tokens, embeddings of tokens and of positions, a norm, logits; and their measurement.
SMALL_REGION_CLASSES = 6


class StaticShapes:
    """Builds the execution and the sampler of static shapes, and warms their graphs.

    Args:
        allocated: the model with its bound KV cache; its kind of graphs is not `off`. If there is a draft model, a
            bucket is warm once both models have its graph. Workers that share out experts warm the same graphs in the
            same order, because graphs hold collectives.
        buckets, usage: results of `choose_buckets`.
        refill: fills tensors that steps write and other objects have made, including the KV cache, with their first
            values.
    """

    def __init__(
        self, allocated: AllocatedModel, buckets: BucketSet, usage: Steps | None, refill: Callable[[], None]
    ) -> None:
        loaded, metrics, sparse, carried = allocated.model, allocated.metrics, allocated.sparse, allocated.carried
        decoder, draft_model, compiler = loaded.decoder, loaded.draft_decoder, loaded.compiler
        vllm_config, config, device, tensors_on = loaded.vllm_config, loaded.config, loaded.device, loaded.tensors_on
        ranks = loaded.ranks if decoder.lockstep is None else decoder.lockstep.workers
        self._ranks = ranks
        self._has_logits = decoder.has_logits
        self._compiler = compiler
        self._refill_others = refill
        self._config = config.graphs
        self._device = device
        self._metrics = metrics
        self._usage = usage
        self._reasons: set[str] = set()
        self._compiled = device.compilations()
        self.stages = RecipeStages(device, config.graphs.recipe_check, tensors_on.type, metrics.recipe)
        stage: Stage = self.stages if self.stages.are_cut else nullcontext
        # engines that share out experts are idle at different times, and warm graphs together
        self._warm_up_kind = config.graphs.warm_up
        if decoder.lockstep is not None and self._warm_up_kind == "idle":
            self._warm_up_kind = "full"
        # whether `begin_step` and `end_step` have work to do
        self.follows_steps = self._warm_up_kind == "idle" or device.kind == "hpu"
        ready = ReadyBuckets(buckets, usage)
        # the graphs of both models may share memory, because only one runs at a time
        make_runner = runner_maker(loaded.kind, compiler)

        def make_execution(
            model: Decoder, stage: Stage, sparse: SparseWorker | None, carried: CarriedTokens | None, rows_each: int
        ) -> BucketedExecution:
            implementation = config.attention.implementation
            capture = Capture(
                make_runner,
                stage,
                config.attention.causal_slice,
                device.pins_host_memory,
                choose_static_implementation(implementation, tensors_on.type, model.specs),
                compiler,
            )
            return BucketedExecution(
                model,
                ready,
                tensors_on,
                capture,
                sparse=sparse,
                carried=carried,
                rows_each=rows_each,
                groups=allocated.groups if model is decoder else allocated.draft_groups,
            )

        self.execution = make_execution(decoder, stage, sparse, carried, 1 + vllm_config.num_speculative_tokens)
        region = uncompiled if compiler is None else compiler.step_region
        self.draft_model: DraftModelGraphs | None = None
        if draft_model is not None:
            self.draft_model = DraftModelGraphs(
                lambda stage: make_execution(draft_model, stage, None, carried, 1),
                stage,
                region,
                kept=loaded.draft_probabilities,
                max_rows=buckets.limits.max_num_seqs,
            )
        self.divided_logits = DividedLogits(self.execution, tensors_on, stage, region)
        most_rows = buckets.limits.max_num_seqs
        self.sampler = StaticSampler(
            vllm_config, tensors_on, most_rows, stage, self.bypassed, allocated.host, region=region, carried=carried
        )
        remainders = () if self.execution.remainders is None else self.execution.remainders.keys
        if compiler is not None:
            shapes = len(buckets.forward) + len(buckets.logits) + len(remainders)
            # choices of blocks differ by layer, and small regions have several classes
            kinds = SMALL_REGION_CLASSES + (1 if sparse is None else decoder.num_layers)
            # a layer and the plan of its parts, for each group; layers of a group may be of two kinds
            most_groups = max(len(one.groups) for one in (allocated.groups, allocated.draft_groups))
            kinds += 3 * (most_groups - 1)
            compiler.expect(shapes * kinds * (1 if draft_model is None else 2))
        self._report = WarmUpReport(logger)
        self._warm_up = WarmUp(
            ready,
            GraphRuns(self._warm_forward, self._warm_logits, remainders, self._warm_remainder),
            self._free_memory,
            self._on_progress,
            loaded.memory_budget,
            agreement=ranks,
        )
        self._idle = IdleWarmUp(self._warm_up, finished=self._warm_up_is_over)

    @property
    def executions(self) -> list[BucketedExecution]:
        """Returns the execution of the model, and of a draft model if there is one."""
        return [self.execution] if self.draft_model is None else [self.execution, self.draft_model.execution]

    def warm_up(self) -> float:
        """Warms the graphs needed before serving and starts warming the rest; returns the seconds it took."""
        buckets = self.execution.ready.buckets
        skeleton = choose_skeleton(buckets, self._usage, self._config.skeleton)
        with self._report.bar():
            self._compile_first(lambda compiles_only: self._warm_up.run_skeleton(skeleton, compiles_only))
            if self._warm_up_kind == "full":
                self._compile_first(self._warm_up.run_all)
        self.stages.seal()
        self._metrics.waits(self._idle.waits, self._idle.waited_seconds)
        self._compiled = self._device.compilations()
        if self._warm_up_kind == "idle":
            logger.info("%s; the rest is warmed while the engine is idle", summary_line(self.summary()))
            self._log_cache()
            # graphs of several workers wait for each other, so the scheduler decides when (`warm_next`)
            if self._ranks.size == 1:
                self._idle.start()
        else:
            self._warm_up_is_over()
        return self.summary().seconds

    def warm_share(self, index: int, count: int) -> None:
        """Warms a share of the buckets, after `warm_up` with `ucm.graphs.warm_up: skeleton`."""
        self._compile_first(lambda compiles_only: self._warm_up.run_share(index, count, compiles_only))

    def summary(self) -> WarmUpSummary:
        return self._warm_up.summary()

    def warm_next(self) -> WarmUpState:
        """Warms the graph that saves most, in a step without tokens that every worker runs.

        The first worker chooses it: stages of a pipeline count different steps, and only the last stage counts logits.
        """
        keys: list[BucketKey] = [*self.execution.ready.buckets.forward, *self.execution.ready.buckets.logits]
        wanted = self._warm_up.ready.next_cold()
        key_index = self._ranks.most(-1 if wanted is None or self._ranks.rank else keys.index(wanted))
        if key_index < 0:
            return WarmUpState(0)
        key = keys[key_index]
        self._warm_up.warm(key)
        cold = len(self._warm_up.ready.cold)
        if not cold:
            self._warm_up_is_over()
        return WarmUpState(cold, self._warm_up.last_seconds(key))

    def begin_step(self) -> None:
        """Pauses the warm-up until `end_step`; called before a step. Only needed if `follows_steps`, as that is."""
        self._idle.begin_step()

    def end_step(self) -> None:
        """Resumes the warm-up, and counts recipes that the step compiled; called after sampling."""
        compiled = self._device.compilations()
        for _ in range(compiled - self._compiled):
            self._metrics.recipe()
        if compiled > self._compiled:
            logger.warning("The device compiled %d recipes in a step, after warm-up", compiled - self._compiled)
        self._compiled = compiled
        self._metrics.waits(self._idle.waits, self._idle.waited_seconds)
        self._idle.end_step()

    def close(self) -> None:
        self._idle.stop()

    def bypassed(self, reason: str) -> None:
        """Counts work outside the graphs; logs the first occurrence of each reason."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.info("Bypass of the graphs, from now on only counted: %s", reason)
        self._metrics.bypass(reason)

    def _compile_first(self, warm: Callable[[bool], None]) -> None:
        """Warms graphs without executing them if the device supports this; `warm` is called with whether it does.

        Tensors written in that time must not be read, and some graphs must be executed afterwards: a compiled graph
        does not take the memory of an executed one yet.
        """
        with self._device.compile_only() as compiles_only:
            warm(compiles_only)
        if not compiles_only:
            return
        self._warm(self._refill)
        graphs = [record.key for record in self.summary().records if record.state is GraphState.WARM]
        self._warm_up.execute(extremes(graphs))
        logger.info("Compiled without executing; executed the smallest and the largest bucket of each phase")

    def _refill(self) -> None:
        """Fills every tensor that outlives a step again."""
        self._refill_others()
        self.execution.refill()
        self.divided_logits.refill()
        self.sampler.refill()
        if self.draft_model is not None:
            self.draft_model.refill()

    def _warm_forward(self, shape: ForwardShape) -> None:
        def run() -> None:
            self.execution.warm_forward(shape)
            if self.draft_model is not None:
                self.draft_model.warm_forward(shape)

        self._warm(run)

    def _warm_remainder(self, shape: ForwardShape) -> None:
        # a draft model is dense, and runs the rest of a prompt in its buckets
        self._warm(lambda: self.execution.warm_remainder(shape))

    def _warm_logits(self, rows: int) -> None:
        """Warms a logits graph. A stage without logits only marks its bucket warm, so that all choose the same."""

        def run() -> None:
            if not self._has_logits:
                return
            self.divided_logits.warm(self.execution.warm_logits(rows))
            self.sampler.warm(rows)
            if self.draft_model is not None:
                self.draft_model.warm_logits(rows)
                if self.draft_model.kept is not None:
                    self.sampler.warm_drafts(rows, self.draft_model.kept.values)

        self._warm(run)

    def _warm(self, run: Callable[[], None]) -> None:
        """Runs in the warm-up thread: inference mode, device and the recorder's state belong to a thread."""
        self._device.enter_thread()
        try:
            with self._device.capturing(), torch.inference_mode(), self.stages.warming():
                run()
            self._device.synchronize()
        finally:
            # recipes compiled before an error do not count for a step either
            self._compiled = self._device.compilations()

    def _on_progress(self, progress: WarmUpProgress) -> None:
        self._report(progress)
        summary = self.summary()
        warm = summary.count(GraphState.WARM)
        total = warm + summary.count(GraphState.COLD)
        self._metrics.warm_up(warm, total, progress.seconds, summary.skeleton_seconds or None)

    def _free_memory(self) -> int:
        """Returns the free device memory; on a CPU the total, because graphs take none and free memory varies."""
        memory = self._device.memory()
        return memory.total if self._device.kind == "cpu" else memory.free

    def _warm_up_is_over(self) -> None:
        """Finishes the warm-up; from now on graphs are not compiled any more."""
        if self._compiler is not None and self._device.kind == "hpu" and self._config.skip_guards:
            self._compiler.skip_guards()
        self._log_summary()

    def _log_summary(self) -> None:
        logger.info("Warm-up\n%s", warm_up_text(self.summary()))
        self._log_cache()

    def _log_cache(self) -> None:
        if self._config.recipe_cache is not None:
            log_cache_hits(self._config.recipe_cache, self._device, self.summary().count(GraphState.WARM))
