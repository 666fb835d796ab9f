"""Computes from the configuration which part of a block each worker of an engine holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.store.shards import Part, Shard
from vllm_gaudi_ucm.vllm_api.distributed import get_pp_indices
from vllm_gaudi_ucm.vllm_api.stage_layers import block_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import ModelConfig, VllmConfig


def engine_shards(vllm_config: VllmConfig, layer_bytes: Sequence[int], groups: Sequence[int]) -> tuple[Shard, ...]:
    """Returns a shard for each worker, by rank: the ranks of a pipeline stage follow each other.

    layer_bytes: bytes of a block in each layer of one worker that it has room for. With several stages all layers are
        alike.
    groups: how many layers that worker has in each KV-cache group.
    """
    parallel, speculation = vllm_config.parallel_config, vllm_config.speculative_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    models = [vllm_config.model_config]
    if speculation is not None and speculation.method == "draft_model":
        # its layers are in the same blocks, and its heads may be divided differently
        models.append(speculation.draft_model_config)
    total = vllm_config.model_config.get_total_num_hidden_layers()
    in_stages = block_layers(vllm_config, groups) if pp_size > 1 else []
    shards = []
    for rank in range(tp_size * pp_size):
        stage, tp_rank = divmod(rank, tp_size)
        first, end = get_pp_indices(total, stage, pp_size)
        shards.append(
            Shard(
                kv_heads=tuple(_kv_heads(model, tp_rank, tp_size) for model in models),
                layers=(first, end, total),
                tp_size=tp_size,
                pp_size=pp_size,
                block_bytes=sum(layer_bytes) if pp_size == 1 else in_stages[stage] * layer_bytes[0],
            )
        )
    return tuple(shards)


def _kv_heads(model: ModelConfig, tp_rank: int, tp_size: int) -> Part:
    """Divides KV heads like vLLM's layers: if there are more ranks than heads, several ranks have the same one."""
    # every rank has the whole latent of a token
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    if heads >= tp_size:
        each = heads // tp_size
        return tp_rank * each, (tp_rank + 1) * each, heads
    head = tp_rank // (tp_size // heads)
    return head, head + 1, heads
