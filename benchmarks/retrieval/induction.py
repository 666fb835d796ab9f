"""Weights that training starts from: an induction circuit (Olsson et al. 2022, arXiv 2209.11895).

Left to itself a model of this size needs tens of thousands of steps to find the circuit; started from it, a few hundred
to make it good. Layer 0 writes the previous token next to the own one, layer 1 compares the own token with it.
"""

from __future__ import annotations

from typing import Any

import torch

SUBSPACE = 63
# First dimension of the half of the residual stream that holds the previous token.
PREVIOUS = 64
CONSTANT = 127
NOISE = 0.02
FAST_PAIRS = 20
FIRST_SLOW_PAIR = 14


@torch.no_grad()
def start_from_induction(model: Any, seed: int) -> None:
    """Overwrites the weights of an untrained model, in place."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.normal_(0, NOISE, generator=generator)
    embedding = model.model.embed_tokens.weight
    embedding[:, :SUBSPACE].normal_(0, 1, generator=generator)
    embedding[:, CONSTANT] = 1.0
    model.model.norm.weight.fill_(0.2)
    first, second = (layer.self_attn for layer in model.model.layers)
    _previous_token_head(first, model.model.rotary_emb.inv_freq)
    _matching_heads(second, generator)


def _previous_token_head(attention: Any, frequencies: torch.Tensor) -> None:
    """Query heads 0 and 1 attend the position before the row's own, and copy its token into the other half."""
    dim, half = attention.head_dim, attention.head_dim // 2
    strength = 8.0
    attention.k_proj.weight[:FAST_PAIRS, CONSTANT] = strength
    for head in range(2):
        rows = attention.q_proj.weight[head * dim : (head + 1) * dim, CONSTANT]
        rows[:FAST_PAIRS] = strength * torch.cos(frequencies[:FAST_PAIRS])
        rows[half : half + FAST_PAIRS] = -strength * torch.sin(frequencies[:FAST_PAIRS])
    identity = torch.eye(SUBSPACE)
    attention.v_proj.weight[:SUBSPACE, :SUBSPACE] += identity
    attention.o_proj.weight[PREVIOUS : PREVIOUS + SUBSPACE, :SUBSPACE] += identity


def _matching_heads(attention: Any, generator: torch.Generator) -> None:
    """All heads attend where the previous token is the row's own, and copy the token found there to the output."""
    dim, half = attention.head_dim, attention.head_dim // 2
    slow = torch.cat([torch.arange(FIRST_SLOW_PAIR, half), torch.arange(half + FIRST_SLOW_PAIR, dim)])
    groups = attention.k_proj.weight.shape[0] // dim
    heads = attention.q_proj.weight.shape[0] // dim
    for group in range(groups):
        projection = 0.3 * torch.randn(len(slow), SUBSPACE, generator=generator)
        attention.k_proj.weight[group * dim + slow, PREVIOUS : PREVIOUS + SUBSPACE] += projection
        attention.v_proj.weight[group * dim : group * dim + SUBSPACE, :SUBSPACE] += torch.eye(SUBSPACE)
        for head in range(group * heads // groups, (group + 1) * heads // groups):
            attention.q_proj.weight[head * dim + slow, :SUBSPACE] += projection
            attention.o_proj.weight[:SUBSPACE, head * dim : head * dim + SUBSPACE] += 0.5 * torch.eye(SUBSPACE)
