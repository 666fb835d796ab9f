"""Refuses, by name and when the engine starts, features of vLLM that our options exclude."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.config.exclusions import TOKEN_SLOTS
from vllm_gaudi_ucm.connector.transfer_config import (
    EXTRA_CONFIG,
    LMCACHE,
    NIXL,
    OFFLOADING,
    OURS,
    ConnectorOptions,
    configured_connectors,
    connector_names,
    has_connector,
)
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, UnsupportedFeatureError
from vllm_gaudi_ucm.scheduler.scheduler_class import shares_experts
from vllm_gaudi_ucm.store.factory import lasting_kinds
from vllm_gaudi_ucm.store.file import FileStoreOptions
from vllm_gaudi_ucm.vllm_api.platforms import (
    PROFILER_ACTIVITIES,
    computes_drafts,
    has_heads_of_several_sizes,
    uses_older_ray_executor,
)

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.memory_mode.options import MemoryModeOptions

_MODE = "with ucm.memory_mode"


def keeps_one_block_table(vllm_config: VllmConfig, config: UcmConfig) -> bool:
    """Returns True if vLLM's hybrid KV-cache manager must be off, because a feature needs one block table for all
    layers. Windows are then computed as usual, and their KV cache takes as much memory as full attention. vLLM does the
    same with connectors that need one table, and logs a warning if the model has windows.

    Raises UnsupportedFeatureError if the hybrid manager was requested.
    """
    scheduler = vllm_config.scheduler_config
    beside = [name for name, is_on in _needs_one_table(vllm_config, config) if is_on]
    if beside and scheduler.disable_hybrid_kv_cache_manager is False:
        raise UnsupportedFeatureError(
            f"block tables of several KV-cache groups with {', '.join(beside)} (leave the flag out: one table is kept)",
            "--no-disable-hybrid-kv-cache-manager",
        )
    return bool(beside)


def _needs_one_table(vllm_config: VllmConfig, config: UcmConfig) -> Iterator[tuple[str, bool]]:
    """Yields (feature, whether it is on) for features that refer to blocks without their group."""
    speculation, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    stages = vllm_config.parallel_config.pipeline_parallel_size > 1
    yield "heads of several sizes", has_heads_of_several_sizes(vllm_config.model_config)
    yield TOKEN_SLOTS.words, TOKEN_SLOTS.is_on(config)
    has_draft_model = computes_drafts(speculation)
    connects = has_connector(vllm_config)
    yield "a draft model with a KV connector or pipeline stages", has_draft_model and (connects or stages)
    # vLLM sets the connector of --kv-offloading-size later
    other = any(one.name not in (None, OURS, OFFLOADING) for one in configured_connectors(transfer))
    yield f"a KV connector that is not {OURS} or {OFFLOADING}", other
    # these count the layers of all stages in a block
    moves = stages and (config.preemption.swaps or connects)
    what = "pipeline stages with ucm.preemption.mode swap or auto, or a KV connector"
    yield f"{what}, of a model without layer_types", moves and not _knows_layers(vllm_config)
    uneven = moves and OFFLOADING in connector_names(vllm_config) and len(set(_block_layers(vllm_config))) > 1
    yield f"{OFFLOADING} over pipeline stages with different numbers of layers in a block", uneven
    # a stage does not know which layers of other stages are in a group
    yield "ucm.ucm_sparse_method with pipeline stages", stages and config.ucm_sparse_method is not None


def _knows_layers(vllm_config: VllmConfig) -> bool:
    # not while vLLM is looking for its platform
    from vllm_gaudi_ucm.vllm_api.stage_layers import names_layer_kinds

    return names_layer_kinds(vllm_config)


def _block_layers(vllm_config: VllmConfig) -> list[int]:
    from vllm_gaudi_ucm.vllm_api.stage_layers import expected_block_layers

    return expected_block_layers(vllm_config)


def _asked_by(transfer: KVTransferConfig | None) -> str:
    """Returns the flag that requests a connector; vLLM sets the connector of the second flag later."""
    return "--kv-transfer-config" if transfer is not None and transfer.kv_connector else "--kv-offloading-size"


def refuse_with_ranks(vllm_config: VllmConfig, config: UcmConfig) -> None:
    """Raises UnsupportedFeatureError for features with parts that differ between pipeline stages.

    Raises UcmConfigError for a store of our connector that is in the memory of one process.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1:
        return
    if parallel.pipeline_parallel_size > 1:
        stages = f"with {parallel.pipeline_parallel_size} pipeline stages"
        if config.memory_mode.enabled:
            # workers agree on a step's copies in each step, and stages run different steps at the same time
            raise UnsupportedFeatureError(
                f"ucm.memory_mode {stages} (take --tensor-parallel-size)", "--pipeline-parallel-size"
            )
        _refuse_with_stages(vllm_config, stages)
    for one in configured_connectors(vllm_config.kv_transfer_config):
        if one.name in (NIXL, LMCACHE):
            what = f"the KV connector {one.name} with {parallel.world_size} workers, which has not been tried"
            raise UnsupportedFeatureError(f"{what} (take {OURS})", "--tensor-parallel-size")
        if one.name == OURS:
            store = ConnectorOptions.resolve(one.extra, one.key).store
            if store.ends_with_process:
                others = " or ".join(f'"{kind}"' for kind in lasting_kinds())
                found = f'"{store.kind}" with {parallel.world_size} workers, of which none sees another\'s memory'
                raise UcmConfigError([Problem(f"{one.key}.store.kind", found, f"{others}, which all of them reach")])


def _refuse_with_stages(vllm_config: VllmConfig, beside: str) -> None:
    """Refuses connectors that are not known to work if a step is in flight while the next one loads and saves."""
    transfer, names = vllm_config.kv_transfer_config, connector_names(vllm_config)
    for name in names:
        if name not in (OURS, OFFLOADING):
            raise UnsupportedFeatureError(f"the KV connector {name} {beside}", _asked_by(transfer))
    sizes = _block_layers(vllm_config) if OFFLOADING in names else []
    if len(set(sizes)) > 1:
        found = f"the KV connector {OFFLOADING} with stages of {', '.join(map(str, sizes))} layers"
        option = f"VLLM_PP_LAYER_PARTITION or {_asked_by(transfer)}"
        raise UnsupportedFeatureError(f"{found}, which it takes for equal ({OURS} does not)", option)


def refuse_with_shared_experts(vllm_config: VllmConfig, config: UcmConfig) -> None:
    """Raises UnsupportedFeatureError for sparse methods, whose prompt remainders have separate graphs: engines that
    share out experts run the same graph in each step.
    """
    if shares_experts(vllm_config) and config.ucm_sparse_method is not None:
        engines = vllm_config.parallel_config.data_parallel_size
        raise UnsupportedFeatureError(
            f"ucm.ucm_sparse_method with {engines} engines that share out experts (take --tensor-parallel-size)",
            "--data-parallel-size",
        )


def refuse_with_latents(vllm_config: VllmConfig, config: UcmConfig) -> None:
    """Raises UnsupportedFeatureError for connectors that expect keys and values if a layer has one tensor for both, and
    for features that a choice of tokens excludes.
    """
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    if model is None or not model.use_mla:
        return
    for one in configured_connectors(transfer):
        if one.name not in (None, OURS, OFFLOADING):
            beside = f"with multi-head latent attention, whose cache is one tensor (take {OURS} or {OFFLOADING})"
            raise UnsupportedFeatureError(f"the KV connector {one.name} {beside}", _asked_by(transfer))
    _refuse_with_chosen_tokens(vllm_config, config)


def _refuse_with_chosen_tokens(vllm_config: VllmConfig, config: UcmConfig) -> None:
    """Raises UnsupportedFeatureError for features that a choice of tokens by the model (DSA) excludes, if contexts may
    be longer than what a row chooses.
    """
    # not while vLLM is looking for its platform
    from vllm_gaudi_ucm.vllm_api.model import follow_indexer_types, shares_chosen_tokens, tokens_to_choose

    follow_indexer_types(vllm_config.model_config)
    chosen = tokens_to_choose(vllm_config)
    if not chosen:
        return
    model = f"with a model that chooses {chosen} tokens for each row (DSA)"
    shorter = f"set --max-model-len to at most {chosen}"
    transfer = vllm_config.kv_transfer_config
    if config.ucm_sparse_method is not None:
        raise UnsupportedFeatureError(f"a sparse method {model} (leave it out, or {shorter})", "ucm.ucm_sparse_method")
    if TOKEN_SLOTS.is_on(config):
        raise UnsupportedFeatureError(f"a slot for each token {model} (take blocks, or {shorter})", TOKEN_SLOTS.words)
    others = [name for name in connector_names(vllm_config) if name != OURS]
    if others:
        what = f"the KV connector {others[0]} {model} (take {OURS}, or {shorter})"
        raise UnsupportedFeatureError(what, _asked_by(transfer))
    if vllm_config.parallel_config.pipeline_parallel_size > 1 and shares_chosen_tokens(vllm_config.model_config):
        raise UnsupportedFeatureError(
            f"choices of tokens that layers share over pipeline stages (take --tensor-parallel-size, or {shorter})",
            "--pipeline-parallel-size",
        )


_CARDS = {
    "hpu": "a process takes a free card of those in HABANA_VISIBLE_MODULES; set that variable",
    "cpu": "all workers share the CPU; leave the flag out",
}


def refuse_device_ids(vllm_config: VllmConfig, device_type: str) -> None:
    """Raises UnsupportedFeatureError for devices by id if a worker cannot choose."""
    parallel, instead = vllm_config.parallel_config, _CARDS.get(device_type)
    given = parallel.assigned_physical_gpu_ids
    if instead is None or given is None or parallel.use_ray:
        return
    # vLLM also records here which devices it gave to the last engine that it started
    if len(given) >= parallel.world_size * parallel.data_parallel_size_local:
        raise UnsupportedFeatureError(f"devices by their ids on {device_type} ({instead})", f"--device-ids {given}")


def refuse_other_profiler(vllm_config: VllmConfig, device_type: str) -> None:
    """Raises UnsupportedFeatureError for a profiler, or an activity, that the device does not have."""
    config = vllm_config.profiler_config
    if config.profiler == "cuda" and device_type != "cuda":
        raise UnsupportedFeatureError(f"the profiler cuda on {device_type} (take torch)", "--profiler-config")
    for activity in config.torch_profiler_activities or ():
        if activity not in PROFILER_ACTIVITIES[device_type]:
            others = " and ".join(PROFILER_ACTIVITIES[device_type])
            raise UnsupportedFeatureError(
                f"a profile of the activity {activity} on {device_type} (take {others}, or leave the option out)",
                "--profiler-config torch_profiler_activities",
            )


def refuse_older_ray_executor(vllm_config: VllmConfig) -> None:
    """Raises UnsupportedFeatureError for the executor on Ray that does not drive workers of platform plugins."""
    if uses_older_ray_executor(vllm_config):
        raise UnsupportedFeatureError(
            "vLLM's older executor on Ray (take the other: unset the variable)", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"
        )


def refuse_with_memory_mode(vllm_config: VllmConfig, options: MemoryModeOptions) -> None:
    """Raises UnsupportedFeatureError for features that read block tables and do not know of offloaded blocks: a KV
    connector other than ours, and a draft model, whose layers share the tables.

    Raises UcmConfigError for copies in the connector's folder, which each would fill up to its own capacity.
    """
    speculation, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    if transfer is not None:
        _check_connector(transfer, options)
    if computes_drafts(speculation):
        raise UnsupportedFeatureError(f"a draft model {_MODE}", "--speculative-config")


def _check_connector(transfer: KVTransferConfig, options: MemoryModeOptions) -> None:
    if transfer.kv_connector != OURS:
        name = transfer.kv_connector or "OffloadingConnector"
        raise UnsupportedFeatureError(f"the KV connector {name} {_MODE}", _asked_by(transfer))
    store = ConnectorOptions.resolve(transfer.kv_connector_extra_config, EXTRA_CONFIG).store
    both = [one.lasting for one in (store, options.store) if one is not None]
    paths = [one.path.resolve() for one in both if isinstance(one, FileStoreOptions)]
    if len(paths) == 2 and paths[0] == paths[1]:
        wanted = f"another folder than that of {EXTRA_CONFIG}.store"
        raise UcmConfigError([Problem("ucm.memory_mode.store.path", str(paths[1]), wanted)])
