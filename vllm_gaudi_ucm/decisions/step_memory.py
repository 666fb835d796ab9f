"""Computes how much memory attention of a step takes on Gaudi, and how large steps may be to fit.

Other implementations never have scores of a whole step in memory. Imports no torch, so that plans are quick.
"""

from dataclasses import dataclass, replace

from vllm_gaudi_ucm.graphs.cost.specs import ModelSpec
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits, default_shared_blocks
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES, TILE_ROWS
from vllm_gaudi_ucm.ops.chosen_tokens.score_memory import choice_bytes
from vllm_gaudi_ucm.ops.unified_attention.score_memory import LEAST_ROWS, AttentionSizes, attention_bytes

GIB = 1 << 30
# Of the table of shared blocks, int32 [requests, shared blocks]: 16 MiB, which a step copies to the device at most.
MOST_SHARED_ENTRIES = 1 << 22


def step_bytes(shape: ForwardShape, model: ModelSpec, block_size: int, selected_rows: int = 1) -> int:
    """Returns the most bytes that attention of one layer needs in addition to its inputs; layers run one after the
    other.

    selected_rows: of a request with chosen blocks.
    """
    reach = shape.max_prompt_tiles
    sizes = AttentionSizes(
        heads=model.heads,
        kv_heads=model.kv_heads,
        dim=model.head_dim,
        rows=shape.query_len,
        causal="c" in shape.phase,
        shared=shape.shared_blocks * block_size,
        unique=shape.unique_blocks * block_size,
        selected=shape.selected_blocks * block_size,
        selected_rows=selected_rows,
        max_look_back=None if reach == ALL_TILES else reach * TILE_ROWS,
    )
    latent = model.latent
    tokens = sizes.shared + sizes.unique + (sizes.rows if sizes.causal else 0)
    if latent is not None and 0 < latent.chosen < tokens:
        # scores, and attention over what is chosen, in tiles; queries and results are whole
        whole = attention_bytes(replace(sizes, causal=False, shared=0, unique=0))
        return max(whole, choice_bytes(sizes.rows, tokens, sizes.unique, latent.index * model.dtype_bytes))
    if latent is None or not sizes.causal:
        return attention_bytes(sizes)
    # prompts alone are computed with the keys of each head
    key = latent.nope + latent.rotary
    expanded = replace(sizes, kv_heads=model.heads, dim=key, shared=0, unique=0, selected=0)
    return max(attention_bytes(sizes), attention_bytes(expanded))


@dataclass(frozen=True)
class StepMemory:
    """A bound of this memory.

    gib: `ucm.graphs.step_memory`.
    """

    model: ModelSpec
    gib: float

    def rows(self, most: int, least: int, max_model_len: int) -> int:
        """The most rows, from `least` to `most`, that fit together with the context of one request of `max_model_len`
        tokens.

        `least` if nothing fits: `gib_of` tells its memory.
        """
        steps = range(most, min(most, max(least, LEAST_ROWS)) - 1, -LEAST_ROWS)
        return next((rows for rows in steps if self.gib_of(rows, max_model_len) <= self.gib), min(least, most))

    def gib_of(self, rows: int, tokens: int) -> float:
        """GiB of prompts of `rows` rows over `tokens` tokens of context."""
        return step_bytes(ForwardShape.from_sizes(True, rows, tokens, 0), self.model, block_size=1) / GIB

    def bound(self, limits: Limits) -> Limits:
        """The limits with fewer shared blocks per step if more do not fit, but at least those of one request."""
        least, most = limits.blocks_per_request, limits.most_shared_blocks
        while most > least and self.gib_of(limits.max_num_batched_tokens, most * limits.block_size) > self.gib:
            most = max(least, most * 7 // 8)
        return limits if most == limits.most_shared_blocks else replace(limits, max_shared_blocks=most)


def as_served(limits: Limits, memory: StepMemory | None, own_blocks: bool = False) -> Limits:
    """Returns the default number of shared blocks of the largest bucket, as far as `memory` allows, unless it is given.

    own_blocks: attention reads only each request's own shared blocks. A pad of the shared part is then an entry of its
    table without a product, while a step in several parts would read the weights once for each. So there is no bound.
    """
    if limits.max_shared_blocks is not None:
        return limits
    shared = default_shared_blocks(limits.max_model_len, limits.block_size, limits.strip)
    if own_blocks:
        shared = max(shared, min(limits.max_context_blocks, MOST_SHARED_ENTRIES // limits.max_num_seqs))
    limits = replace(limits, max_shared_blocks=shared)
    return limits if memory is None else memory.bound(limits)
