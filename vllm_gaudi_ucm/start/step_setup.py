"""Makes the runner of steps, and declares the order of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.batch.group_planner import planner_of
from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.execution.divided_logits import TrueShapeLogits
from vllm_gaudi_ucm.execution.true_shape_execution import TrueShapeExecution
from vllm_gaudi_ucm.ops.registry import has_folders
from vllm_gaudi_ucm.runner.drafts import Drafts, make_drafts
from vllm_gaudi_ucm.runner.parts import (
    AheadSteps,
    CheckedSteps,
    LockstepSteps,
    MemorySteps,
    SparseSteps,
    StaticSteps,
    StepRecords,
    TransferSteps,
    TrueShapeSteps,
    WorkerPart,
)
from vllm_gaudi_ucm.runner.profiled_steps import ProfiledSteps
from vllm_gaudi_ucm.runner.step_check import StepCheck
from vllm_gaudi_ucm.runner.step_end import make_end
from vllm_gaudi_ucm.runner.step_runner import StepRunner
from vllm_gaudi_ucm.runner.step_sampler import LogitsSource, NoSampler, StepSampler
from vllm_gaudi_ucm.runner.steps_ahead import StepsAhead
from vllm_gaudi_ucm.sampling.prompt_logprobs import PromptLogprobs
from vllm_gaudi_ucm.sampling.sampling import NanCounter, SamplingBatch, SlotSampler, TokenSampler, VllmSampler
from vllm_gaudi_ucm.speculation.verification import Verification
from vllm_gaudi_ucm.start.proposer_setup import make_proposer
from vllm_gaudi_ucm.vllm_api.engine_process import is_worker_process
from vllm_gaudi_ucm.vllm_api.sampling import Sampler

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.cpu.native_graphs import NativeGraphs
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.memory.memory_worker import MemoryWorker
    from vllm_gaudi_ucm.runner.loaded_model import AllocatedModel, LoadedModel
    from vllm_gaudi_ucm.runner.static_shapes import StaticShapes


class StepObjects(NamedTuple):
    """The runner of steps. ahead: None without asynchronous scheduling. verification: None without drafts."""

    runner: StepRunner
    drafts: Drafts
    ahead: StepsAhead | None
    verification: Verification | None


def make_steps(
    allocated: AllocatedModel,
    sampling: SamplingBatch,
    static: StaticShapes | None,
    memory: MemoryWorker | None,
    records: StepRecords,
) -> StepObjects:
    """Makes the runner of steps. None: it is switched off."""
    model, host, requests = allocated.model, allocated.host, allocated.requests
    execution, token_sampler = _make_execution(allocated, static)
    nans = NanCounter(sampling, None if static is None else host)
    slots = SlotSampler(sampling, token_sampler, requests, nans.count)
    ahead = _make_ahead(allocated, static)
    drafts = _make_drafts(allocated, static)
    verification = None if model.vllm_config.speculative_config is None else Verification(slots, host)
    sampler = NoSampler()
    if model.decoder.has_logits:
        sampler = StepSampler(slots, nans, _logits_source(allocated, execution, static), drafts, verification)
    parts = _make_parts(allocated, static, memory, ahead, drafts=drafts, records=records, follow=execution.follow)
    runner = StepRunner(
        requests=requests,
        # with asynchronous scheduling two batches are in flight, too, but of the same requests
        planner=planner_of(
            [
                group.planner(
                    model.config.attention.causal_slice, model.vllm_config.parallel_config.pipeline_parallel_size
                )
                for group in allocated.groups.groups
            ]
        ),
        execution=execution,
        sampler=sampler,
        drafts=drafts,
        end=make_end(sampler, parts, ahead),
        parts=parts,
    )
    return StepObjects(runner, drafts, ahead, verification)


def _make_parts(
    allocated: AllocatedModel,
    static: StaticShapes | None,
    memory: MemoryWorker | None,
    ahead: StepsAhead | None,
    drafts: Drafts,
    records: StepRecords,
    follow: Callable[[], None],
) -> tuple[WorkerPart, ...]:
    """Makes the parts in the order of a step: each hook is called on one part after the other, in this order."""
    sparse, transfer = allocated.sparse, allocated.transfer
    lockstep, check, profiler = allocated.model.decoder.lockstep, _make_check(allocated.model), allocated.model.profiler
    in_flight: Sized = () if ahead is None else ahead
    outputs_together = ahead is None or ahead.verifies_at_once
    parts = (
        TrueShapeSteps() if static is None else StaticSteps(static, in_flight),
        None if ahead is None else AheadSteps(ahead),
        # before the parts that fill blocks, whose summaries are void then
        None if sparse is None else SparseSteps(sparse),
        None if memory is None else MemorySteps(memory, sparse),
        # behind the parts that choose and report, before the drafts
        None if check is None else CheckedSteps(check, checks_offload=sparse is not None and outputs_together),
        drafts,
        # behind the drafts, which read and write blocks, too
        None if transfer is None else TransferSteps(transfer, sparse, in_flight),
        None if lockstep is None else LockstepSteps(lockstep, follow),
        # behind all that add figures
        records,
        # a phase ends after the others have acted
        None if profiler is None else ProfiledSteps(profiler),
    )
    return tuple(part for part in parts if part is not None)


def _make_check(model: LoadedModel) -> StepCheck | None:
    if model.ranks.size == 1 or not model.config.distributed.check_ranks:
        return None
    return StepCheck(model.ranks, Ranks.of_layer())


def _make_ahead(allocated: AllocatedModel, static: StaticShapes | None) -> StepsAhead | None:
    if allocated.carried is None:
        return None
    return StepsAhead(
        allocated.requests,
        allocated.carried,
        allocated.host,
        static=static,
        drafts=allocated.drafts_ahead,
        # if there is a connector, each worker reports what it has moved
        asked=allocated.model.ranks.reports or allocated.transfer is not None,
        is_apart=is_worker_process(),
    )


def _make_drafts(allocated: AllocatedModel, static: StaticShapes | None) -> Drafts:
    graphs = _native_graphs(allocated, allocated.model.draft_decoder)
    proposer = make_proposer(allocated, static, graphs)
    return make_drafts(allocated.requests, proposer, allocated.drafts_ahead)


def _logits_source(allocated: AllocatedModel, execution: Execution, static: StaticShapes | None) -> LogitsSource:
    config = allocated.model.vllm_config.model_config
    scores = PromptLogprobs(
        execution,
        Sampler(config.logprobs_mode, config.use_fp64_gumbel),
        config.get_vocab_size(),
        as_logits=config.logprobs_mode.endswith("logits"),
        host=None if static is None else allocated.host,
    )
    if static is None:
        return LogitsSource(execution, TrueShapeLogits(), scores, lambda reason: None, at_once=True)
    return LogitsSource(execution, static.divided_logits, scores, static.bypassed, at_once=False)


def _make_execution(allocated: AllocatedModel, static: StaticShapes | None) -> tuple[Execution, TokenSampler]:
    """Makes the execution and the sampler of steps, by the kind of graphs."""
    if static is not None:
        return static.execution, static.sampler
    model, model_config = allocated.model, allocated.model.vllm_config.model_config
    execution = TrueShapeExecution(
        model.decoder,
        model.attention,
        allocated.block_size,
        model.tensors_on,
        allocated.sparse,
        _native_graphs(allocated, model.decoder),
        carried=allocated.carried,
        groups=allocated.groups,
    )
    return execution, VllmSampler(model_config.logprobs_mode, model_config.use_fp64_gumbel)


def _native_graphs(allocated: AllocatedModel, decoder: Decoder | None) -> NativeGraphs | None:
    """Makes the graphs of a decoder's small steps at true shapes, on a CPU.

    None with connectors other than ours, which may be called between the layers: a graph runs no Python there. None
    with several ranks or engines, whose collectives are not native calls.
    """
    model = allocated.model
    on_cpu = model.tensors_on.type == "cpu" and model.kind == "off" and has_folders("cpu")
    if decoder is None or not on_cpu or allocated.calls_layers or not model.config.cpu.native_graphs:
        return None
    # of latents, which way new tokens take depends on the parts, and products are no native calls
    if model.ranks.size > 1 or decoder.lockstep is not None or decoder.latent is not None:
        return None
    from vllm_gaudi_ucm.execution.cpu.native_graphs import NativeGraphs

    return NativeGraphs(decoder, allocated.metrics.native_graphs())
