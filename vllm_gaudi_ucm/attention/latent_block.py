"""The block of multi-head latent attention that takes the place of vLLM's in its models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from vllm_gaudi_ucm.attention.indexer import TokenIndexer
from vllm_gaudi_ucm.attention.latent import LatentAttention, LatentAttentionImpl, LatentSizes
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.attention import MLAModules, MultiHeadLatentAttentionWrapper, PluggableLayer
from vllm_gaudi_ucm.vllm_api.indexer import IndexerModules, register_no_kernels
from vllm_gaudi_ucm.vllm_api.model import op_registry_oot, shares_chosen_tokens, tokens_to_choose

if TYPE_CHECKING:
    from vllm.config import CacheConfig


class LatentAttentionBlock(MultiHeadLatentAttentionWrapper):
    """Maps hidden states to hidden states: the projections that the model made, rotary embedding, and attention.

    vLLM makes one of these, with the same arguments, when a model makes its wrapper. others: options by which vLLM's
    own layer may fuse its operations.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: MLAModules,
        cache_config: CacheConfig | None = None,
        quant_config: Any = None,
        prefix: str = "",
        skip_topk: bool = False,
        non_causal_multi_token_decode: bool = False,
        **others: Any,
    ) -> None:
        from vllm.config import get_current_vllm_config

        nn.Module.__init__(self)
        if non_causal_multi_token_decode:
            raise UnsupportedFeatureError("latent attention in both directions", f"the model's layer {prefix}")
        vllm_config = get_current_vllm_config()
        self.indexer = None
        chosen = tokens_to_choose(vllm_config) if mla_modules.is_sparse else 0
        if chosen and not skip_topk:
            assert mla_modules.indexer is not None, "vLLM's model makes it"
            assert mla_modules.indexer_rotary_emb is not None, "vLLM's model makes it"
            modules = cast(IndexerModules, mla_modules.indexer)
            self.indexer = TokenIndexer(modules, mla_modules.indexer_rotary_emb)
        self.sizes = LatentSizes(num_heads, kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim, chosen)
        self.q_lora_rank = q_lora_rank
        self.fused_qkv_a_proj = mla_modules.fused_qkv_a_proj
        self.kv_a_proj_with_mqa = mla_modules.kv_a_proj_with_mqa
        self.q_a_layernorm = mla_modules.q_a_layernorm
        self.query_proj = mla_modules.q_proj if q_lora_rank is None else mla_modules.q_b_proj
        self.kv_a_layernorm = mla_modules.kv_a_layernorm
        self.rotary_emb = mla_modules.rotary_emb
        self.g_proj = mla_modules.g_proj
        self.o_proj = mla_modules.o_proj
        self.mla_attn = LatentAttention(  # type: ignore[assignment]  # in place of vLLM's
            self.sizes,
            scale,
            mla_modules.kv_b_proj,
            vllm_config,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
            index_size=0 if self.indexer is None else self.indexer.key_size,
        )
        if chosen and shares_chosen_tokens(vllm_config.model_config):
            assert mla_modules.topk_indices_buffer is not None, "vLLM's model makes it"
            cast(LatentAttentionImpl, self.mla_attn.impl).share_choices(mla_modules.topk_indices_buffer)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs the block. positions: [rows]; hidden_states: [rows, hidden size]; llama_4_scaling: [rows, 1, 1]."""
        sizes = self.sizes
        given, of_token = self._down(hidden_states)
        latent = self.kv_a_layernorm(of_token[:, : sizes.latent].contiguous())
        rotary = of_token[:, None, sizes.latent :]
        query = _project(self.query_proj, given).unflatten(1, (sizes.heads, -1))
        if self.rotary_emb is not None:
            turned = query[..., sizes.nope :].contiguous()
            turned, rotary = self.rotary_emb(positions, turned, rotary.contiguous())
            query = torch.cat((query[..., : sizes.nope], turned), -1)
        if llama_4_scaling is not None:
            query = query * llama_4_scaling
        index = None if self.indexer is None else self.indexer(positions, hidden_states, given)
        found = self.mla_attn(query, latent, rotary, index)
        if self.g_proj is not None:
            found = found * _project(self.g_proj, hidden_states).sigmoid()
        return _project(self.o_proj, found)

    def _down(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the input of the query projection, and [rows, latent + rotary] before the norm and the positions."""
        if self.q_lora_rank is None:
            return hidden_states, _project(self.kv_a_proj_with_mqa, hidden_states)
        both = _project(self.fused_qkv_a_proj, hidden_states)
        assert self.q_a_layernorm is not None, "of models with a latent of queries"
        query, of_token = both.split([self.q_lora_rank, self.sizes.cached], -1)
        return self.q_a_layernorm(query.contiguous()), of_token


def _project(projection: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    """Returns the product alone; vLLM's linear layers return (product, bias)."""
    assert projection is not None, "vLLM's model makes it"
    return cast(torch.Tensor, projection(x)[0])


def register_latent_attention() -> None:
    """Makes models that are built afterwards in this process use our layer. Safe to call more than once."""
    name = MultiHeadLatentAttentionWrapper.__name__
    if name not in op_registry_oot:
        PluggableLayer.register_oot(LatentAttentionBlock, name=name)
    register_no_kernels()
