"""A model on its device, before and after its KV cache is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.sampling.draft_probabilities import draft_probabilities_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.batch.request_table import RequestTable
    from vllm_gaudi_ucm.config.sections import AttentionConfig
    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.decisions.graph_kind import GraphKind
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.distributed.ranks import Ranks
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.execution.decoder import Decoder
    from vllm_gaudi_ucm.execution.layer_groups import LayerGroups
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler
    from vllm_gaudi_ucm.kv_cache.pair import LayerCache
    from vllm_gaudi_ucm.lora.adapter_manager import AdapterManager
    from vllm_gaudi_ucm.observability.host_work import HostWork
    from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
    from vllm_gaudi_ucm.observability.step_profiler import StepProfiler
    from vllm_gaudi_ucm.runner.kv_transfer import KvTransfer
    from vllm_gaudi_ucm.runner.model_pooler import ModelPooler
    from vllm_gaudi_ucm.sampling.draft_probabilities import DraftProbabilities
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import SparseWorker
    from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead
    from vllm_gaudi_ucm.vllm_api.kv_cache import KVCacheConfig


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, and the engine's settings for it.

    vllm_config, config: the engine's config, and the plugin's own.
    device, tensors_on: device of the model and the KV cache.
    kind: kind of the graphs; `off` runs steps at their true shapes.
    decoder, draft_decoder: the model, and the draft model if there is one.
    memory_budget: bytes that graphs may take; None for no bound.
    compiler: compiler of the decoders' regions; None if they are not compiled.
    ranks: all workers of the engine, of which this is one.
    pooler: makes embeddings, scores or classes of the last layer's hidden states; None if the model samples tokens.
    adapters: loads adapters (LoRA); None if they are switched off.
    profiler: None unless the engine can be profiled.
    """

    vllm_config: VllmConfig
    config: UcmConfig
    device: Device
    tensors_on: torch.device
    kind: GraphKind
    decoder: Decoder
    draft_decoder: Decoder | None
    memory_budget: int | None
    compiler: StaticCompiler | None
    ranks: Ranks
    pooler: ModelPooler | None = None
    adapters: AdapterManager | None = None
    profiler: StepProfiler | None = None

    @property
    def by_token(self) -> bool:
        return self.config.kv_cache.granularity == "token"

    @property
    def draft_probabilities(self) -> DraftProbabilities | None:
        """Returns the table of the distributions of random drafts; None if drafts are not random."""
        return None if self.draft_decoder is None else draft_probabilities_of(self.draft_decoder.model)

    @property
    def attention(self) -> AttentionConfig:
        """Returns the options of attention. If each token has its own slot, the cache is not read as a slice, because
        several rows may use one block.
        """
        given = self.config.attention
        return given.model_copy(update={"contiguous_pa": False}) if self.by_token else given


@dataclass(frozen=True)
class AllocatedModel:
    """A loaded model with its KV cache, and the objects used around steps. An object is None if its feature is
    disabled.

    kv_cache_config: vLLM's config, in blocks as attention reads them.
    groups, draft_groups: groups of the KV cache, with the layers of either model.
    transfer: a KV connector. sparse: a sparse method.
    metrics: receives figures. host: counts the waits of steps, and their work on the host.
    carried, drafts_ahead: with async scheduling, tokens and drafts that the host may not know yet.
    """

    model: LoadedModel
    kv_cache_config: KVCacheConfig
    kv_caches: dict[str, LayerCache]
    groups: LayerGroups
    draft_groups: LayerGroups
    requests: RequestTable
    transfer: KvTransfer | None
    sparse: SparseWorker | None
    metrics: StepMetrics
    host: HostWork
    carried: CarriedTokens | None
    drafts_ahead: DraftsAhead | None

    @property
    def block_size(self) -> int:
        return self.groups.groups[0].kv.block_size

    @property
    def calls_layers(self) -> bool:
        return self.transfer is not None and self.transfer.in_layers
