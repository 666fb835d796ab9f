"""How many layers a KV-cache block has room for on each stage of a pipeline, which knows only its own layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.vllm_api.distributed import get_pp_indices
from vllm_gaudi_ucm.vllm_api.kv_cache import AttentionSpec, FullAttentionSpec, SlidingWindowSpec, expected_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheGroupSpec

_WHOLE = "full_attention"


def names_layer_kinds(vllm_config: VllmConfig) -> bool:
    """True if the model's configuration tells how far each layer sees.

    Reason: vLLM knows about a layer only what its worker reports.
    Remove when: `KVCacheConfig` has the layers of all stages in the scheduler, and in each worker.
    """
    return _layer_kinds(vllm_config) is not None


def names_whole_contexts(vllm_config: VllmConfig) -> bool:
    """True if the model's configuration names a layer that sees whole contexts.

    Reason: as for `names_layer_kinds`.
    Remove when: as for `names_layer_kinds`.
    """
    return _WHOLE in (_layer_kinds(vllm_config) or ())


def _layer_kinds(vllm_config: VllmConfig) -> Sequence[str] | None:
    model = vllm_config.model_config
    values = {} if model is None else model.hf_text_config.to_dict()
    kinds = values.get("layer_types") or ()
    if model is None or len(kinds) != model.get_total_num_hidden_layers():
        return None
    # a layer that reads another one's cache is in no group
    return None if values.get("num_kv_shared_layers") else kinds


def expected_block_layers(vllm_config: VllmConfig) -> list[int]:
    """Returns for each stage the layers that a block has room for, according to the model's configuration: the layers
    of the stage's largest KV-cache group, or all of its layers if there is one group.

    Reason: as for `names_layer_kinds`.
    Remove when: as for `names_layer_kinds`.
    """
    groups = _expected_groups(vllm_config)
    ranges = _stages(vllm_config)
    return [max(len(part) for part in _of_stage(groups, one)) if groups else len(one) for one in ranges]


def block_layers(vllm_config: VllmConfig, found: Sequence[int]) -> list[int]:
    """Returns the same, once the groups are made. found: layers of this worker in each group; in the scheduler, of the
        first worker.

    Raises ValueError if the model's groups differ from its configuration.

    Reason: as for `names_layer_kinds`.
    Remove when: as for `names_layer_kinds`.
    """
    ranges = _stages(vllm_config)
    if len(found) == 1:
        return [len(one) for one in ranges]
    parallel = vllm_config.parallel_config
    stage = parallel.rank // parallel.tensor_parallel_size
    expected = [len(part) for part in _of_stage(_expected_groups(vllm_config), ranges[stage])]
    if list(found) != expected:
        raise ValueError(
            f"--pipeline-parallel-size {len(ranges)}: stage {stage} has KV-cache groups of {list(found)} layers, "
            f"expected {expected} by the model's layer_types; take --disable-hybrid-kv-cache-manager"
        )
    return expected_block_layers(vllm_config)


def engine_block_bytes(block_bytes: int, groups: Sequence[KVCacheGroupSpec], vllm_config: VllmConfig) -> int:
    """Bytes of a block on all workers together, which have the same number of slots each.

    block_bytes: of what one worker has of it. groups: with that worker's layers. Pipeline stages may have other numbers
    of layers in a block.

    Reason: as for `names_layer_kinds`.
    Remove when: as for `names_layer_kinds`.
    """
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        own = [len(group.layer_names) for group in groups]
        block_bytes = block_bytes // max(own) * sum(block_layers(vllm_config, own))
    return block_bytes * parallel.tensor_parallel_size


def _stages(vllm_config: VllmConfig) -> list[range]:
    stages, model = vllm_config.parallel_config.pipeline_parallel_size, vllm_config.model_config
    # a configuration without a model has no layers
    total = 0 if model is None else model.get_total_num_hidden_layers()
    return [range(*get_pp_indices(total, stage, stages)) for stage in range(stages)]


def _of_stage(groups: Sequence[Sequence[int]], stage: range) -> list[list[int]]:
    return [[layer for layer in group if layer in stage] for group in groups]


def _expected_groups(vllm_config: VllmConfig) -> list[list[int]]:
    """Returns the numbers of the layers of each group; empty if the model does not tell."""
    kinds = _layer_kinds(vllm_config)
    if kinds is None:
        return []
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return [list(range(len(kinds)))]
    # only the partition of layers matters, not their kinds
    windows = {kind: 1 + number for number, kind in enumerate(sorted({*kinds} - {_WHOLE}))}
    alike = {kind: _spec(windows.get(kind)) for kind in kinds}
    made = expected_groups({str(layer): alike[kind] for layer, kind in enumerate(kinds)})
    return [[int(name) for name in group.layer_names] for group in made]


def _spec(window: int | None) -> AttentionSpec:
    if window is None:
        return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    return SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32, sliding_window=window)
