"""Reads what both sides of the connector need from vLLM's configuration: options, sizes, and inputs of keys."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.config.ucm_config import UcmConfig, connector_prefetch, resolve_config
from vllm_gaudi_ucm.connector.forward_inputs import forward_inputs
from vllm_gaudi_ucm.connector.group_keys import GroupKeys
from vllm_gaudi_ucm.connector.transfer_config import EXTRA_CONFIG, ConnectorOptions
from vllm_gaudi_ucm.memory_mode.summary_records import summary_bytes
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError
from vllm_gaudi_ucm.prefetch.options import EngineOptions, PrefetchOptions
from vllm_gaudi_ucm.store.block_key import Namespace
from vllm_gaudi_ucm.store.factory import lasting_kinds, open_store
from vllm_gaudi_ucm.store.shards import Part, Shard, ShardLookups, ShardStore
from vllm_gaudi_ucm.vllm_api.distributed import get_pp_indices
from vllm_gaudi_ucm.vllm_api.kv_cache import AttentionSpec, KVCacheConfig, kept_tokens, layer_specs
from vllm_gaudi_ucm.vllm_api.stage_layers import block_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_ucm.sparse.options import BlockOptions
    from vllm_gaudi_ucm.store.base import KvStore


# options of the prefetch engine: they decide when a block comes, not its content
_NO_PART_OF_KV = set(EngineOptions.model_fields)


@dataclass(frozen=True)
class ConnectorSetup:
    """The set-up of one engine; `layers` in their order in a stored block: a worker's own layers, in the scheduler the
    first worker's. groups: names of the layers that share a block table. windows: for each group, the most tokens that
    the next one sees; None: all.
    """

    vllm_config: VllmConfig
    options: ConnectorOptions
    block_size: int
    layers: dict[str, AttentionSpec]
    groups: tuple[tuple[str, ...], ...]
    windows: tuple[int | None, ...]

    @classmethod
    def from_config(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ConnectorSetup:
        """Reads the configuration. Raises UcmConfigError for options that cannot be used."""
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        groups = kv_cache_config.kv_cache_groups
        layers = {name: spec for name, spec in layer_specs(kv_cache_config).items() if isinstance(spec, AttentionSpec)}
        options = ConnectorOptions.resolve(extra, EXTRA_CONFIG)
        _check_process(options, vllm_config.parallel_config.distributed_executor_backend)
        names = tuple(tuple(group.layer_names) for group in groups)
        setup = cls(vllm_config, options, groups[0].kv_cache_spec.block_size, layers, names, tuple(kept_tokens(groups)))
        if setup.offloads and not setup.loads_partly and options.asks_for_partial_loads:
            wanted = "false, or no such option, with ucm.memory_mode and layers with windows: prompts are loaded whole"
            raise UcmConfigError([Problem(f"{EXTRA_CONFIG}.partial_loads", "true", wanted)])
        return setup

    @property
    def block_bytes(self) -> int:
        """The bytes that one worker holds of a block with all layers of a group, without padding."""
        return sum(self._layer_bytes)

    @property
    def _layer_bytes(self) -> list[int]:
        # a block has room for the largest group, and belongs to one group at a time
        return [self.layers[name].unpadded_page_size_bytes for name in max(self.groups, key=len)]

    @cached_property
    def group_keys(self) -> GroupKeys:
        return GroupKeys(self.windows, self.block_size)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shard of each worker, by rank. Empty with one worker, which holds whole blocks."""
        if self.vllm_config.parallel_config.world_size == 1:
            return ()
        return engine_shards(self.vllm_config, self._layer_bytes, [len(group) for group in self.groups])

    @property
    def worker_saves(self) -> bool:
        """True if this worker saves the blocks that the step lists. Of workers that hold the same, the first does."""
        rank = self.vllm_config.parallel_config.rank
        return not self.shards or self.shards.index(self.shards[rank]) == rank

    @property
    def loads(self) -> bool:
        assert self.vllm_config.kv_transfer_config is not None
        return self.vllm_config.kv_transfer_config.is_kv_consumer

    @property
    def saves(self) -> bool:
        assert self.vllm_config.kv_transfer_config is not None
        return self.options.save and self.vllm_config.kv_transfer_config.is_kv_producer

    @property
    def offloads(self) -> bool:
        """True if KV offload is on, with which loads may leave blocks in the store."""
        return resolve_config(self.vllm_config.additional_config).memory_mode.enabled

    @property
    def loads_partly(self) -> bool:
        """True if loads leave blocks in the store, with KV offload, if all layers have one block table."""
        return self.options.loads_partly and len(self.groups) == 1

    @cached_property
    def prefetch_options(self) -> PrefetchOptions:
        """Returns the connector's own options, on top of those in GSA's section if that method selects."""
        options = connector_prefetch(self.options.prefetch, resolve_config(self.vllm_config.additional_config))
        return options.for_blocks_of(self.block_bytes)

    def summaries_per_record(self, method: BlockOptions) -> int:
        """Returns how many blocks' summaries fit into a record of the store, which has the size of a block."""
        bytes_per_block = sum(
            summary_bytes(method, self.block_size, spec.num_kv_heads, spec.head_size, spec.dtype.itemsize)
            for spec in self.layers.values()
        )
        return self.block_bytes // bytes_per_block

    def open_store(self) -> KvStore:
        """Opens the store of a worker. Its keys are those of whole blocks."""
        store = open_store(self.options.store, self.block_bytes)
        if not self.shards:
            return store
        shard = self.shards[self.vllm_config.parallel_config.rank]
        if shard.block_bytes != self.block_bytes:
            raise RuntimeError(
                f"UcmConnector: this worker has {self.block_bytes} bytes of a block, expected {shard.block_bytes}"
            )
        return ShardStore(store, shard)

    def open_lookups(self) -> KvStore | ShardLookups:
        """Opens the stores for the scheduler, which looks up whole blocks."""
        if not self.shards:
            return open_store(self.options.store, self.block_bytes)
        sizes = {shard.block_bytes for shard in self.shards}
        return ShardLookups({size: open_store(self.options.store, size) for size in sizes}, self.shards)

    @cached_property
    def dense_namespace(self) -> Namespace:
        """Returns the namespace of requests to which no sparse method applies.

        Raises UcmConfigError if the weights cannot be told from others of the same name.
        """
        vllm_config, model = self.vllm_config, self.vllm_config.model_config
        spec = next(iter(self.layers.values()))
        shapes = [
            (name, layer.num_kv_heads, layer.head_size, layer.head_size_v, str(layer.dtype))
            for name, layer in self.layers.items()
        ]
        places = {name: number for number, name in enumerate(self.layers)}
        groups = [[places[name] for name in group] for group in self.groups]
        models = forward_inputs(vllm_config)
        if unknown := [one.name for one in models if not one.is_known]:
            self._refuse_unknown_weights(unknown)
        return Namespace(
            # not names: servers that share a store may keep the same weights in different places
            model="+".join(map(str, model.hf_config.architectures or ["model"])),
            revision=_digest([one.values for one in models]),
            dtype=str(model.dtype),
            kv_dtype=str(spec.dtype),
            block_size=self.block_size,
            layers=len(self.layers),
            kv_heads=spec.num_kv_heads,
            head_sizes=(spec.head_size, spec.head_size_v),
            tp_size=vllm_config.parallel_config.tensor_parallel_size,
            pp_size=vllm_config.parallel_config.pipeline_parallel_size,
            layout=f"layer k|v token head {_digest(shapes if len(groups) == 1 else [shapes, groups])}",
        )

    def _refuse_unknown_weights(self, models: list[str]) -> None:
        """Refuses weights known only by name: engines with other weights of that name would find the blocks."""
        if not self.options.store.ends_with_process:
            found = f"none, and no weights in files here that tell {' and '.join(models)} apart"
            raise UcmConfigError([Problem("--revision", found, "a name that changes when the weights change")])

    def namespace(self, sparse: bool) -> bytes:
        """Returns the digest for a request; sparse: whether the engine's sparse method applies to it."""
        return self._sparse_digest if sparse else self._dense_digest

    @cached_property
    def _dense_digest(self) -> bytes:
        return self.dense_namespace.digest()

    @cached_property
    def _sparse_digest(self) -> bytes:
        policy = sparse_policy(resolve_config(self.vllm_config.additional_config))
        return Namespace(**{**vars(self.dense_namespace), "sparse_policy": policy}).digest()


def _check_process(options: ConnectorOptions, executor: object) -> None:
    """Refuses a store in process memory unless the engine runs its worker itself, so that both share memory."""
    if options.store.ends_with_process and executor not in (None, "uni"):
        found = f'"{options.store.kind}" with --distributed-executor-backend {executor}'
        others = " or ".join(f'"{kind}"' for kind in lasting_kinds())
        raise UcmConfigError([Problem(f"{EXTRA_CONFIG}.store.kind", found, f"{others}, or no such flag")])


def sparse_policy(config: UcmConfig) -> str:
    """Returns method and options if they change KV; empty without a method."""
    if config.ucm_sparse_method is None:
        return ""
    options = config.ucm_sparse_config.options(config.ucm_sparse_method)
    policy = f"{config.ucm_sparse_method} {options.model_dump_json(exclude=_NO_PART_OF_KV)}"
    if not config.memory_mode.enabled:
        return policy
    # answers attend to blocks on the device, which affects their KV; the place of the others does not
    return f"{policy} memory_mode {config.memory_mode.model_dump_json(exclude={'store'})}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


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
