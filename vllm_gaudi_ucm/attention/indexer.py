"""The indexer of a layer whose rows choose tokens by themselves (DSA): from hidden states to scores' inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from vllm_gaudi_ucm.ops.chosen_tokens.implementation import IndexRows
from vllm_gaudi_ucm.ops.kv_cache.api import write_rows

if TYPE_CHECKING:
    from vllm_gaudi_ucm.vllm_api.indexer import IndexerModules


def write_index_keys(index: IndexRows, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Writes the keys of the indexer, which are never rounded to 8 bits; returns the cache as [slots, key size].

    cache: [slots, 1, key size].
    """
    return write_rows(index.key[:, None], cache, slots)[:, 0]


class TokenIndexer(nn.Module):
    """Computes queries, keys and weights with the projections that vLLM's model has made; each worker has all heads.

    Args:
        modules: of the model, which owns the weights.
        rotary: rotary embedding of the first elements of queries and keys.
    """

    def __init__(self, modules: IndexerModules, rotary: nn.Module) -> None:
        super().__init__()
        self.key_size, self.heads, self._turned = modules.head_dim, modules.n_head, modules.rope_dim
        self.wq_b, self.wk_weights_proj, self.k_norm = modules.wq_b, modules.wk_weights_proj, modules.k_norm
        self.rotary_emb = rotary
        self._scale = (self.key_size * self.heads) ** -0.5

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, query_latent: torch.Tensor) -> IndexRows:
        """Returns the inputs of scores. positions: [rows]; hidden_states: [rows, hidden size]; query_latent: [rows,
        latent size of queries].
        """
        query = cast(torch.Tensor, self.wq_b(query_latent)[0]).unflatten(-1, (self.heads, self.key_size))
        both = cast(torch.Tensor, self.wk_weights_proj(hidden_states)[0])
        key = self.k_norm(both[:, : self.key_size].contiguous())[:, None]
        turned = self._turned
        of_query, of_key = self.rotary_emb(positions, query[..., :turned].contiguous(), key[..., :turned].contiguous())
        query = torch.cat((of_query.view(len(query), self.heads, turned), query[..., turned:]), -1)
        key = torch.cat((of_key.view(len(query), 1, turned), key[..., turned:]), -1)
        return IndexRows(query, key[:, 0], both[:, self.key_size :].float() * self._scale)
