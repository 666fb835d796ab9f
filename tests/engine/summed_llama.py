"""A package from outside: a model whose layers keep a running sum of each request's tokens, and that kind of state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.sequence import IntermediateTensors
from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.engine.reference_model import ReferenceModel
from vllm_gaudi_ucm.attention.backend import UnifiedAttentionBackend
from vllm_gaudi_ucm.attention.groups import GroupStep
from vllm_gaudi_ucm.execution.cache_group import CACHE_GROUPS
from vllm_gaudi_ucm.execution.state_group import StateGroup, StateInputs

ARCHITECTURE = "SummedLlamaForCausalLM"
KINDS = 16


def table(hidden_size: int, seed: int) -> torch.Tensor:
    """float32 [kinds, hidden size], as large as what it is added to: which row says the sum of a request's tokens."""
    return torch.randn(KINDS, hidden_size, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class SumSpec(KVCacheSpec):
    """One number behind each block."""

    @property
    def page_size_bytes(self) -> int:
        return 8


class RunningSum(nn.Module, AttentionLayerBase):  # type: ignore[misc]  # vLLM's classes are not typed
    """Sums the tokens of each request, up to each row."""

    kv_cache: tuple[torch.Tensor]

    def __init__(self, vllm_config: VllmConfig, name: str) -> None:
        super().__init__()
        vllm_config.compilation_config.static_forward_context[name] = self
        self._step = GroupStep()

    def get_attn_backend(self) -> type[UnifiedAttentionBackend]:
        return UnifiedAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return SumSpec(vllm_config.cache_config.block_size)

    def join(self, group: GroupStep | None) -> None:
        assert group is not None
        self._step = group

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [rows]."""
        if get_forward_context().attn_metadata is None:
            return token_ids
        step: StateInputs = self._step.metadata
        up_to = token_ids.cumsum(0)
        before = up_to.index_select(0, step.first_rows) - token_ids.index_select(0, step.first_rows)
        (states,) = self.kv_cache
        begin = states.index_select(0, step.sources)[:, 0] - before
        found = up_to + begin.index_select(0, step.row_requests)
        states.index_copy_(0, step.kept_at, found.index_select(0, step.kept_rows)[:, None])
        return found


class SummedLlama(LlamaForCausalLM):  # type: ignore[misc]  # vLLM's class is not typed
    """Adds a row for the sum of a request's tokens to embeddings, and another one to the last hidden states."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **others: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **others)
        self.first = RunningSum(vllm_config, f"{prefix}first") if get_pp_group().is_first_rank else None
        self.last = RunningSum(vllm_config, f"{prefix}last") if get_pp_group().is_last_rank else None
        for seed, name in enumerate(("first_table", "last_table")):
            self.register_buffer(name, table(self.config.hidden_size, seed), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if self.first is not None:
            sums = self.first(input_ids) % KINDS
            inputs_embeds = self.embed_input_ids(input_ids) + self.first_table.index_select(0, sums)
        found = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        if self.last is None:
            return found
        return found + self.last_table.index_select(0, self.last(input_ids) % KINDS)


class SumGroup(StateGroup):
    """Running sums."""

    spec = SumSpec
    layer_classes = (RunningSum,)

    @classmethod
    def states_of(cls, spec: KVCacheSpec) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((1,), torch.int64)]


def register() -> None:
    """In every process of an engine; vLLM calls it as a general plugin."""
    ModelRegistry.register_model(ARCHITECTURE, SummedLlama)
    CACHE_GROUPS.register("running sum", SumGroup)


def install(folder: Path) -> None:
    """Writes what pip leaves of an installed package, into a folder that is on the path."""
    metadata = folder / "sums-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sums\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nsums = {__name__}:register\n\n"
        f"[vllm_gaudi_ucm.cache_groups]\nrunning_sum = {__name__}:SumGroup\n"
    )


class SummedReference(ReferenceModel):
    """Transformers' Llama with the same rows added."""

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        ids = torch.tensor([list(tokens)])
        embedded = self.model.get_input_embeddings()(ids)
        sums, size = ids.cumsum(1) % KINDS, embedded.shape[-1]
        hidden = self.model.model(inputs_embeds=embedded + table(size, 0)[sums]).last_hidden_state
        logits = self.model.lm_head(hidden + table(size, 1)[sums])[0, -keep:]
        return torch.log_softmax(logits.float(), dim=-1)
