"""Makes the runner of steps, and declares the order of its parts."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import nn

from vllm_gaudi_ucm.batch.group_planner import planner_of
from vllm_gaudi_ucm.batch.hidden_places import HiddenPlaces
from vllm_gaudi_ucm.batch.mrope_positions import MropePositions
from vllm_gaudi_ucm.config.exclusions import KEPT_STATES
from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.execution.divided_logits import TrueShapeLogits
from vllm_gaudi_ucm.execution.recurrent_group import RecurrentGroup, RowsPlanner
from vllm_gaudi_ucm.execution.state_group import StateGroup
from vllm_gaudi_ucm.execution.true_shape_execution import TrueShapeExecution
from vllm_gaudi_ucm.kv_cache.allocation import GIB
from vllm_gaudi_ucm.kv_cache.pair import alike
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.memory.swap_space import SwapSpace
from vllm_gaudi_ucm.multimodal.item_encoder import item_encoder_of
from vllm_gaudi_ucm.ops.registry import has_folders
from vllm_gaudi_ucm.runner.adapter_steps import AdapterSteps
from vllm_gaudi_ucm.runner.drafts import Drafts, HiddenStateSteps, make_drafts
from vllm_gaudi_ucm.runner.mrope_steps import MropeSteps
from vllm_gaudi_ucm.runner.multimodal_steps import MultimodalSteps
from vllm_gaudi_ucm.runner.parts import (
    TOO_MANY_BLOCKS,
    AheadSteps,
    AllParts,
    LockstepSteps,
    MemorySteps,
    SparseSteps,
    StaticSteps,
    StepRecords,
    TransferSteps,
    TrueShapeSteps,
)
from vllm_gaudi_ucm.runner.pooling import PoolingSteps
from vllm_gaudi_ucm.runner.profiled_steps import ProfiledSteps
from vllm_gaudi_ucm.runner.prompt_embedding_steps import PromptEmbeddingSteps
from vllm_gaudi_ucm.runner.state_steps import KeptStates, StateSteps, SwappedStates
from vllm_gaudi_ucm.runner.step_check import StepCheck
from vllm_gaudi_ucm.runner.step_end import make_end
from vllm_gaudi_ucm.runner.step_runner import StepRunner
from vllm_gaudi_ucm.runner.step_sampler import LogitsSource, NoSampler, StepSampler
from vllm_gaudi_ucm.runner.steps_ahead import StepsAhead
from vllm_gaudi_ucm.sampling.prompt_logprobs import PromptLogprobs
from vllm_gaudi_ucm.sampling.sampling import NanCounter, SamplingBatch, SlotSampler, TokenSampler, VllmSampler
from vllm_gaudi_ucm.speculation.draft_choice import RandomDrafts
from vllm_gaudi_ucm.speculation.draft_model import DraftModelProposer
from vllm_gaudi_ucm.speculation.proposer import DraftProposer, NgramProposer
from vllm_gaudi_ucm.speculation.verification import Verification
from vllm_gaudi_ucm.vllm_api.engine_process import is_worker_process
from vllm_gaudi_ucm.vllm_api.platforms import is_pooling
from vllm_gaudi_ucm.vllm_api.sampling import Sampler

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.cpu.native_graphs import NativeGraphs
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.execution.execution import Execution
    from vllm_gaudi_ucm.memory.memory_worker import MemoryWorker
    from vllm_gaudi_ucm.runner.loaded_model import AllocatedModel, LoadedModel
    from vllm_gaudi_ucm.runner.static_shapes import StaticShapes


logger = plugin_logger(__name__)


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
    verification = None
    if model.vllm_config.speculative_config is not None:
        verification = Verification(slots, host, model.draft_probabilities)
    sampler = NoSampler(samples=not is_pooling(model.vllm_config))
    if model.decoder.has_logits:
        sampler = StepSampler(slots, nans, _logits_source(allocated, execution, static), drafts, verification)
    parts = _make_parts(allocated, static, memory, ahead, drafts=drafts, records=records, execution=execution)
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
    execution: Execution,
) -> AllParts:
    """Makes the parts. Each hook is called on one part after the other, in this order."""
    sparse, transfer, adapters = allocated.sparse, allocated.transfer, allocated.model.adapters
    pooler = allocated.model.pooler if allocated.model.decoder.is_last else None
    lockstep, profiler = allocated.model.decoder.lockstep, allocated.model.profiler
    in_flight: Sized = () if ahead is None else ahead
    outputs_together = ahead is None or ahead.verifies_at_once
    parts = (
        TrueShapeSteps() if static is None else StaticSteps(static, in_flight),
        None if ahead is None else AheadSteps(ahead),
        None if adapters is None else AdapterSteps(allocated.requests, adapters),
        _make_mrope(allocated),
        _make_states(allocated),
        _make_multimodal(allocated, static),
        _make_prompt_embeddings(allocated, static),
        _make_hidden_states(allocated),
        # before the parts that fill blocks, whose summaries are void then
        None if sparse is None else SparseSteps(sparse),
        None if memory is None else MemorySteps(memory, sparse),
        # behind the parts that choose and report, before the drafts
        _make_check(allocated.model, checks_offload=sparse is not None and outputs_together),
        None if pooler is None else PoolingSteps(pooler, execution, allocated.model.vllm_config),
        drafts,
        # behind the drafts, which read and write blocks, too
        None if transfer is None else TransferSteps(transfer, sparse, in_flight),
        None if lockstep is None else LockstepSteps(lockstep, execution.follow),
        # behind all that add figures
        records,
        # a phase ends after the others have acted
        None if profiler is None else ProfiledSteps(profiler),
    )
    return AllParts([part for part in parts if part is not None])


def _make_mrope(allocated: AllocatedModel) -> MropeSteps | None:
    decoder = allocated.model.decoder
    if MropePositions not in decoder.inputs:
        return None
    return MropeSteps(allocated.requests, cast(nn.Module, decoder.model))


def _make_states(allocated: AllocatedModel) -> StateSteps | None:
    model, groups = allocated.model, allocated.groups.groups
    keeps, swaps = KEPT_STATES.is_on(model.config), model.config.preemption.swaps
    swapped = [_swapped_states(group, model) for group in groups if swaps and isinstance(group, StateGroup)]
    if not (keeps or swapped):
        return None
    kept = [
        KeptStates(cast(RowsPlanner, group.follows_requests), alike(group.states), model.device)
        for group in groups
        if keeps and isinstance(group, RecurrentGroup)
    ]
    for one in kept:
        one.warm_up()
    return StateSteps(allocated.requests, kept, swapped)


def _swapped_states(group: StateGroup, model: LoadedModel) -> SwappedStates:
    """Makes host memory for the states of preempted requests of a kind, a place for each row of a request."""
    count = model.vllm_config.scheduler_config.max_num_seqs * group.follows_requests.places.rows_each
    space = SwapSpace(alike(group.states), model.device, count)
    logger.info(
        "Preemption: states of preempted requests take up to %.2f GiB of host memory, in addition to blocks",
        count * space.block_bytes / GIB,
    )
    # a Gaudi compiles the copies now, and not during a request
    space.measure()
    return SwappedStates(group.follows_requests, space)


def _make_multimodal(allocated: AllocatedModel, static: StaticShapes | None) -> MultimodalSteps | None:
    encoder = item_encoder_of(allocated.model.decoder.model)
    if encoder is None:
        return None
    return MultimodalSteps(allocated.requests, encoder, (lambda reason: None) if static is None else static.bypassed)


def _make_prompt_embeddings(allocated: AllocatedModel, static: StaticShapes | None) -> PromptEmbeddingSteps | None:
    table = allocated.model.decoder.embeddings
    if table is None or not allocated.model.vllm_config.model_config.enable_prompt_embeds:
        return None
    return PromptEmbeddingSteps(allocated.requests, table, whole=static is not None)


def _make_hidden_states(allocated: AllocatedModel) -> HiddenStateSteps | None:
    model = allocated.model
    if model.decoder.states is None:
        return None
    return HiddenStateSteps(allocated.requests.input_of(HiddenPlaces), model.vllm_config.num_speculative_tokens)


def _make_check(model: LoadedModel, checks_offload: bool) -> StepCheck | None:
    if model.ranks.size == 1 or not model.config.distributed.check_ranks:
        return None
    return StepCheck(model.ranks, Ranks.of_layer(), checks_offload)


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
    # products of adapters are no native calls, and a graph would leave them out
    if decoder is model.decoder and model.adapters is not None:
        return None
    # of latents, which way new tokens take depends on the parts, and products are no native calls; neither are those of
    # encoders
    if model.ranks.size > 1 or decoder.lockstep is not None or decoder.latent is not None or decoder.is_encoder:
        return None
    # a step's embeddings are made in two ways
    if decoder.embeddings is not None:
        return None
    from vllm_gaudi_ucm.execution.cpu.native_graphs import NativeGraphs

    return NativeGraphs(decoder, allocated.metrics.native_graphs())


def make_proposer(
    allocated: AllocatedModel, static: StaticShapes | None = None, graphs: NativeGraphs | None = None
) -> DraftProposer | None:
    """Makes the proposer; None without speculative decoding. features.py refuses other methods.

    Args:
        allocated: the model, its draft model if the method has one, and the table of requests.
        static: the engine's static shapes with the draft model's graphs; None: steps run at true shapes.
        graphs: graphs of the draft model's steps at true shapes, on a CPU.
    """
    model, table = allocated.model, allocated.requests
    config = model.vllm_config.speculative_config
    if config is None:
        return None
    if model.draft_decoder is not None:
        longest = config.draft_model_config.max_model_len
        if static is not None:
            return _draft_model_at_static_shapes(allocated, static, longest)
        execution = TrueShapeExecution(
            model.draft_decoder,
            model.attention,
            allocated.block_size,
            model.tensors_on,
            graphs=graphs,
            carried=allocated.carried,
            groups=allocated.draft_groups,
        )
        kept, max_rows = model.draft_probabilities, model.vllm_config.scheduler_config.max_num_seqs
        return DraftModelProposer(
            execution,
            table,
            allocated.draft_groups.kv,
            longest,
            choice=None if kept is None else RandomDrafts(kept, max_rows),
            ahead=allocated.drafts_ahead,
        )
    assert config.prompt_lookup_min is not None
    assert config.prompt_lookup_max is not None
    num_drafts, lengths = config.num_speculative_tokens, (config.prompt_lookup_min, config.prompt_lookup_max)
    return NgramProposer(table, num_drafts, *lengths, host=allocated.host)


def _draft_model_at_static_shapes(
    allocated: AllocatedModel, static: StaticShapes, max_model_len: int
) -> DraftModelProposer:
    graphs = static.draft_model
    assert graphs is not None, "static shapes without the draft model"

    def divided() -> None:
        static.bypassed(f"pass of the draft model divided: {TOO_MANY_BLOCKS}")

    return DraftModelProposer(
        graphs.execution,
        allocated.requests,
        allocated.draft_groups.kv,
        max_model_len,
        choice=graphs.choice,
        divided=divided,
        host=allocated.host,
        ahead=allocated.drafts_ahead,
    )
