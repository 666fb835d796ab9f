"""The worker that vLLM's executor drives: device, model, KV cache, steps."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.decisions.bucket_choice import reads_own_blocks, server_limits, step_memory
from vllm_gaudi_ucm.decisions.graph_kind import graph_kind, options_without_effect
from vllm_gaudi_ucm.decisions.recipe_cache import compiled_recipes, open_recipe_cache
from vllm_gaudi_ucm.device import get_device
from vllm_gaudi_ucm.device.cpu_threads import choose_threads, waiting_in_words
from vllm_gaudi_ucm.device.host_limits import find_cores
from vllm_gaudi_ucm.device.hpu_mode import check_hpu_mode
from vllm_gaudi_ucm.device.step_activity import STEPS
from vllm_gaudi_ucm.distributed.lockstep import Lockstep
from vllm_gaudi_ucm.distributed.rank_failure import DeviceWatch, Peers, RankGuard, ends_engine
from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.distributed.stage import Stage
from vllm_gaudi_ucm.envs import lazy_mode, local_engines, users_threads, waiting_at_start
from vllm_gaudi_ucm.graphs.shapes.limits import strip_size
from vllm_gaudi_ucm.graphs.warm_up.records import GraphState
from vllm_gaudi_ucm.kv_cache.allocation import kv_cache_budget
from vllm_gaudi_ucm.layers.device_layers import register_device_layers
from vllm_gaudi_ucm.layers.experts import register_experts
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.log_file import of_engine
from vllm_gaudi_ucm.observability.phase_log import PhaseLog
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.observability.step_profiler import StepProfiler
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.platform.model_calls import ModelCalls
from vllm_gaudi_ucm.platform.refused_calls import RefusedCalls, UnsupportedCallError
from vllm_gaudi_ucm.platform.sizes import check_device_sizes, check_kv_cache
from vllm_gaudi_ucm.runner.kv_groups import described, kv_groups
from vllm_gaudi_ucm.runner.other_groups import bytes_of_requests, share_of_blocks
from vllm_gaudi_ucm.runner.resting_steps import RestingSteps
from vllm_gaudi_ucm.start.model_runner import ModelRunner
from vllm_gaudi_ucm.start.sparse_setup import max_selected_blocks, summaries_per_block
from vllm_gaudi_ucm.vllm_api.cache_options import register_float_kv_dtypes
from vllm_gaudi_ucm.vllm_api.distributed import init_distributed_environment, make_model_groups, visible_device
from vllm_gaudi_ucm.vllm_api.engine_process import (
    OF_ENGINE,
    abort_at_shutdown,
    end_start_at_sigterm,
    is_worker_process,
    leave_heap_to_the_system,
    start_is_over,
    watch_parent,
)
from vllm_gaudi_ucm.vllm_api.platforms import tolerate_missing_accelerator
from vllm_gaudi_ucm.vllm_api.worker import (
    CompilationTimes,
    SupportedTask,
    WorkerBase,
    model_loading,
    raised_by_last,
    set_random_seed,
)

if TYPE_CHECKING:
    from vllm_gaudi_ucm.runner.step_runner import StepRunner
    from vllm_gaudi_ucm.runner.steps_ahead import StepOutput
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig, KVCacheSpec
    from vllm_gaudi_ucm.vllm_api.kv_transfer import KVConnectorHandshakeMetadata
    from vllm_gaudi_ucm.vllm_api.steps import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput


logger = plugin_logger(__name__)


# vLLM's executor waits for all workers, first for rank 0, and in steps only for one
_OF_START = ("determine_available_memory", "initialize_from_config", "compile_or_warm_up_model")
_OF_STEPS = ("execute_model", "sample_tokens", "take_draft_token_ids", "execute_dummy_batch")


_HOW_TO_PROFILE = "start the engine with --profiler-config, or read the phase log, which times every step"


class UcmWorker(ModelCalls, RefusedCalls, WorkerBase):
    """One device, one model. See WorkerBase for the contract of each method."""

    _status: int | None = None
    _metrics: StepMetrics | None = None
    _phase_log: PhaseLog | None = None
    _profiler: StepProfiler | None = None
    _steps: StepRunner | RestingSteps
    # to run a step or to end one, which vLLM does in a thread of its own if the worker has a process
    _turn: AbstractContextManager[Any] = contextlib.nullcontext()
    model_runner: ModelRunner  # type: ignore[assignment]  # ours is no nn.Module, which is all WorkerBase says of it

    def init_device(self) -> None:
        watch_parent()
        end_start_at_sigterm(OF_ENGINE)
        leave_heap_to_the_system(lambda: self._status)
        tolerate_missing_accelerator(self.current_platform.device_type)
        abort_at_shutdown(self.vllm_config)
        register_float_kv_dtypes()
        self._ucm = resolve_config(self.vllm_config.additional_config)
        self._device = get_device(self.current_platform.device_type)
        if self._device.kind == "hpu":
            check_hpu_mode()
        graphs = self._ucm.graphs
        kind = graph_kind(self._ucm, self._device.kind, lazy_mode(), self.model_config.enforce_eager)
        for key in options_without_effect(graphs, kind, self._device.kind):
            logger.warning("%s has no effect on %s with graphs %r", key, self._device.kind, kind)
        # before the device is started, which reads it once
        open_recipe_cache(graphs.recipe_cache, self._device, kind)
        self._device.take_device(visible_device(self.parallel_config, self.local_rank))
        self.device = self._device.torch_device()
        # a device counts from the first call on, and loading weights compiles recipes, too
        self._device.compilations()
        check_device_sizes(self._ucm, self._device.memory().total)
        self._set_threads()
        parallel = self.parallel_config
        init_distributed_environment(
            parallel.world_size, self.rank, self.distributed_init_method, self.local_rank, self._device.dist_backend
        )
        make_model_groups(self.vllm_config)
        self._ranks = Ranks.of_engine(output_rank=parallel.world_size - parallel.tensor_parallel_size)
        if self._ranks.size > 1:
            self._name_rank_in_errors()
        set_random_seed(self.model_config.seed)
        # a recipe is found by its operators, and native calls are none; without graphs nothing looks for recipes
        if self._device.kind != "cpu" or kind == "off" or graphs.recipe_check == "off":
            register_device_layers(self._device.kind)
        register_experts()
        stage = Stage.of_engine(self._device)
        self._lockstep = Lockstep.of_engine()
        self.model_runner = ModelRunner(
            self.vllm_config, self._ucm, self._device, kind, ranks=self._ranks, stage=stage, lockstep=self._lockstep
        )

    def _set_threads(self) -> None:
        asked = self._ucm.cpu.threads
        if self._device.kind != "cpu":
            if asked is not None:
                torch.set_num_threads(asked)
            return
        workers = self.parallel_config.local_world_size * local_engines()
        choice = choose_threads(torch.get_num_threads(), find_cores(), workers, asked, users_threads())
        if choice.threads != torch.get_num_threads():
            torch.set_num_threads(choice.threads)
        if self.rank == 0:
            waiting = waiting_in_words(waiting_at_start())
            logger.info("The model is computed by %d threads (%s); %s.", choice.threads, choice.reason, waiting)

    def _name_rank_in_errors(self) -> None:
        """Wraps the calls that all workers of an engine answer together."""
        peers = Peers.from_ranks(self._ranks)
        starts = RankGuard(peers, answers=self._ranks.rank == 0)
        steps = RankGuard(peers, answers=self._ranks.rank == self._ranks.output_rank)
        watch = None
        # every step on Gaudi waits for its tokens, on all workers
        if not steps.answers and self._device.kind != "hpu":
            watch = DeviceWatch(self._device, partial(steps.fail, "on its device"))
            watch.start()
        for name in _OF_START:
            setattr(self, name, ends_engine(getattr(self, name), starts))
        for name in _OF_STEPS:
            setattr(self, name, ends_engine(getattr(self, name), steps, watch))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise UnsupportedFeatureError("elastic expert parallelism", "load_dummy_weights")
        with self.model_runner.start_stages.measured("model"), model_loading(self.vllm_config):
            self.model_runner.load_model()

    def get_model(self) -> nn.Module:
        return cast(nn.Module, self.model_runner.decoder.model)

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        pooler = self.model_runner.pooler
        return ("generate",) if pooler is None else pooler.tasks

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Returns the bytes for the KV cache, measured after the largest steps have run."""
        workers = self.parallel_config.local_world_size * local_engines()
        with self.model_runner.start_stages.measured("measurement of steps"):
            budget = kv_cache_budget(self._device, self.vllm_config, self.model_runner.measure_steps, workers)
        budget = max(budget - self.model_runner.bytes_beside_slots() - bytes_of_requests(self.vllm_config), 0)
        if self._lockstep is not None:
            # limits of buckets follow from the blocks
            budget = self._lockstep.workers.least(budget)
        if self.cache_config.kv_cache_memory_bytes is not None:
            return budget
        # summaries and states of a block are memory of their own
        specs = self.get_kv_cache_spec()
        summaries = summaries_per_block(self._ucm, self.vllm_config, specs)
        return int(budget / (1 + summaries + share_of_blocks(specs, self.vllm_config)))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        # the block size is final only now
        kv_cache_config = self.model_runner.as_allocated(kv_cache_config)
        check_kv_cache(kv_cache_config, self.vllm_config, self._ucm, self._device.memory().total)
        # one rank of all writes them: each runs the same steps
        reports = self._ranks.reports
        engine = self.parallel_config.data_parallel_index
        path = self._ucm.phase_log if reports else None
        self._phase_log = PhaseLog(
            path and of_engine(path, engine),
            {**self._describe(kv_cache_config), "started": datetime.now(UTC).isoformat(timespec="seconds")},
            most_bytes=self._ucm.phase_log_size,
            generations=self._ucm.phase_log_generations,
        )
        self._metrics = (
            StepMetrics.of_engine(self.vllm_config.instance_id, engine) if reports else StepMetrics(None, engine)
        )
        profiler = self.vllm_config.profiler_config
        if profiler.profiler is not None:
            self._profiler = StepProfiler(profiler, self._device.kind, self.rank, self.local_rank)
        with self.model_runner.start_stages.measured("KV cache"):
            self.model_runner.initialize_kv_cache(kv_cache_config, self._phase_log, self._metrics, self._profiler)
        self._take_parts()

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], KVConnectorHandshakeMetadata] | None:
        """The data about this worker that a connector of another engine needs, by (pipeline, tensor-parallel) rank."""
        transfer = self.model_runner.transfer
        metadata = None if transfer is None else transfer.connector.get_handshake_metadata()
        return None if metadata is None else {divmod(self.rank, self.parallel_config.tensor_parallel_size): metadata}

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_config.max_model_len = max_model_len

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warms the buckets that serving starts with; at true shapes there are none."""
        seconds = self.model_runner.warm_up()
        set_random_seed(self.model_config.seed)
        start_is_over()
        return CompilationTimes(language_model=seconds, encoder=0.0)

    def warm_share(self, index: int, count: int) -> None:
        """Warms every `count`-th bucket from `index` on, for `gaudi-ucm warm`: before the first step."""
        if self.model_runner.static is not None:
            self.model_runner.static.warm_share(index, count)

    def warm_up_figures(self) -> dict[str, float]:
        """Returns the numbers of graphs by state, seconds, and compiled recipes, for `gaudi-ucm warm`."""
        static = self.model_runner.static
        if static is None:
            return {}
        summary = static.summary()
        counts: dict[str, float] = {state.value: summary.count(state) for state in GraphState}
        return {**counts, "seconds": summary.seconds, "compiled": compiled_recipes(self._device)}

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | StepOutput | None:
        """Computes a step up to its logits. None: `sample_tokens` returns the output."""
        with self._turn:
            STEPS.begin()
            output = self._steps.execute_model(scheduler_output)
            if output is not None and not self._steps.steps_in_flight:
                STEPS.end()
        return output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | StepOutput:
        with self._turn:
            output = self._steps.sample_tokens(grammar_output)
            # steps ahead end when the last of them is read
            if not self._steps.steps_in_flight:
                STEPS.end()
        return output

    def execute_dummy_batch(self) -> None:
        """Runs a step without requests, if another engine that shares out experts with this one has work. Does nothing
        if an engine has all its experts.
        """
        with self._turn:
            STEPS.begin()
            self._steps.execute_dummy()
            if not self._steps.steps_in_flight:
                STEPS.end()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The drafts that the last step proposed for the next one, once."""
        with self._turn:
            return self._steps.take_draft_token_ids()

    @raised_by_last(UnsupportedFeatureError)
    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Starts or ends a profile of steps; see `LLM.start_profile`."""
        if self._profiler is None:
            raise UnsupportedCallError("profile", "a profile of an engine without a profiler", _HOW_TO_PROFILE)
        with self._turn:
            if is_start:
                bounds = {"delay_iterations": delay_iterations, "max_iterations": max_iterations}
                self._profiler.start(profile_prefix, profiler_kwargs, **bounds)
            else:
                self._profiler.stop()

    def synchronize_device(self) -> None:
        self._device.synchronize()

    def reset_encoder_cache(self) -> None:
        """Forgets the embeddings of all pictures, which vLLM's scheduler has forgotten."""
        self.model_runner.forget_embeddings()

    def get_cache_block_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())

    def get_draft_model(self) -> nn.Module | None:
        return self.model_runner.draft_model

    def get_compilation_match_table(self) -> dict[str, int]:
        """vLLM's own compilation is off, whose passes would count here."""
        return {}

    def get_encoder_timing_stats(self) -> dict[str, dict[str, float | int]]:
        """No multimodal models, no encoder."""
        return {}

    def shutdown(self) -> None:
        # each of them, the runner first, even if another raises
        runner: ModelRunner | None = self.model_runner  # None before `init_device`
        with contextlib.ExitStack() as ends:
            for part in (self._metrics, self._phase_log, runner):
                if part is not None:
                    ends.callback(part.close)
        # vLLM's way out of a loop that was asked to end; anything else is an error. A worker with a process of its own
        # has told the engine of its error already, or ends because of it.
        error = sys.exception()
        if isinstance(error, SystemExit):
            self._status = error.code if isinstance(error.code, int) else 0
        elif is_worker_process():
            self._status = 0

    def _describe(self, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
        """Returns the phase log's header: the data needed to compare or replay the log."""
        static, contiguous = self.model_runner.kind != "off", self._ucm.attention.contiguous_pa
        groups = kv_groups(kv_cache_config.kv_cache_groups, self.vllm_config)
        num_blocks, block_size = kv_cache_config.num_blocks, groups[0].block_size
        shared, by_token = self._ucm.graphs.max_shared_blocks, self._ucm.kv_cache.granularity == "token"
        if static:
            memory = step_memory(self.vllm_config, self._ucm, self._device.kind)
            limits = server_limits(
                self.vllm_config,
                block_size,
                num_blocks,
                contiguous is True,
                shared,
                memory=memory,
                by_token=by_token,
                own_blocks=reads_own_blocks(self._ucm, self._device.kind),
            )
            shared = limits.max_shared_blocks
        selected = max_selected_blocks(self._ucm, self.vllm_config, block_size, num_blocks, static)
        return {
            "model": self.model_config.model,
            "device": self._device.name(),
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_model_len": self.model_config.max_model_len,
            "max_num_seqs": self.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": self.scheduler_config.max_num_batched_tokens,
            "graphs": self.model_runner.kind,
            # at true shapes "auto" chooses in every step, and no step is divided; a graph has one form
            "contiguous": contiguous is True if static else contiguous,
            "max_shared_blocks": shared if static else None,
            **({"max_selected_blocks": selected} if selected else {}),
            **({"strip": strip_size(block_size)} if by_token else {}),
            **described(groups),
        }
