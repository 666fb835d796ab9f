"""The largest step that a configuration allows, by dimension: buckets must hold it and need not exceed it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape

MOST = 2**31 - 1
"""The highest value of any limit, so that their sums and products fit 64 bits."""


class LimitsError(ValueError):
    """Raised for limits that no step fits, or a step beyond them; the message names the limit."""


@dataclass(frozen=True)
class Limits:
    """The limits of a server that bound its steps.

    max_num_batched_tokens: rows of a step.
    max_num_seqs: requests of a step.
    max_model_len: tokens of a request.
    block_size: tokens of a KV-cache block.
    num_blocks: blocks of the KV cache; block 0 is the dummy block and never belongs to a request. 1: the model has no
        cache, and every step consists of whole prompts.
    contiguous: the unique part may read the slice `cache[:k]`, so that it spans all blocks up to the largest id, used
        or not.
    max_shared_blocks: distinct shared blocks of a step. None: all blocks that the requests can use, each of several
        prompts with a context of its own. A bound keeps the largest graph small, whose shared part is rows x blocks;
        a step with more shared blocks then runs in several parts.
    max_selected_blocks: blocks that a sparse method chooses for the requests of a step, counted once for each request.
        0: there is no such method.
    bounds_prompt_tiles: buckets may bound the max prompt tiles, which saves work in Gaudi's attention.
    strip: with a slot for each token, the number of slots that a request gets at once (`strip_size`). Shared and unique
        blocks are then ranges of blocks, and a step with more of them than `max_context_blocks` runs in several parts.
        0: requests get blocks.
    window: tokens of a sliding window, or of a chunk of local attention: a row sees no more tokens, which bounds the
        blocks that a request uses in a step. 0: a row sees its whole context.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    contiguous: bool = True
    max_shared_blocks: int | None = None
    max_selected_blocks: int = 0
    bounds_prompt_tiles: bool = False
    strip: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value > MOST:
                raise LimitsError(f"limit {field.name} is {value:.6g}, expected at most {MOST}")
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size"):
            if getattr(self, name) < 1:
                raise LimitsError(f"limit {name} is {getattr(self, name)}, expected at least 1")
        if self.num_blocks < 1:
            raise LimitsError(
                f"limit num_blocks is {self.num_blocks}, expected at least 2: the dummy block and one for a request "
                "(1 without a cache)"
            )
        if not 0 <= self.strip <= self.block_size:
            raise LimitsError(
                f"limit strip is {self.strip}, expected 0 (blocks), or slots of a block of {self.block_size}"
            )
        if self.max_selected_blocks < 0:
            raise LimitsError(
                f"limit max_selected_blocks is {self.max_selected_blocks}, expected 0 (no sparse method) or more"
            )
        # a request's own context must fit; otherwise it could not run even alone
        least = min(self.blocks_per_request, self.max_context_blocks)
        if self.max_shared_blocks is not None and self.max_shared_blocks < least:
            raise LimitsError(
                f"limit max_shared_blocks is {self.max_shared_blocks}, expected at least {least}: "
                f"the {'ranges' if self.strip else 'blocks'} of one request of {self.max_model_len} tokens"
            )

    @property
    def has_cache(self) -> bool:
        """Returns whether the model keeps keys and values of requests."""
        return self.num_blocks > 1

    @property
    def dense(self) -> Limits:
        """Returns the same limits without selected blocks."""
        return replace(self, max_selected_blocks=0)

    @property
    def blocks_per_request(self) -> int:
        if self.strip:
            return most_ranges(self.max_model_len, self.strip)
        most = -(-self.max_model_len // self.block_size)
        # one more than a window has, because a window may begin inside a block
        return min(most, -(-self.window // self.block_size) + 1) if self.window else most

    @property
    def max_context_blocks(self) -> int:
        """Distinct blocks that the requests of one step can use. With a slot for each token, ranges: one for each strip
        of the cache, and at least the ranges of one request.
        """
        requests = self.max_num_seqs * self.blocks_per_request
        if not self.strip:
            return min(self.num_blocks - 1, requests)
        strips = (self.num_blocks - 1) * -(-self.block_size // self.strip)
        return min(max(strips, self.blocks_per_request), requests)

    @property
    def most_shared_blocks(self) -> int:
        """`max_shared_blocks`, within what the requests of a step can use."""
        most = self.max_context_blocks
        return most if self.max_shared_blocks is None else min(most, self.max_shared_blocks)

    @property
    def max_unique_blocks(self) -> int:
        return self.num_blocks if self.contiguous and self.has_cache else self.max_context_blocks

    @property
    def max_decode_rows(self) -> int:
        """Rows of a step in which every request has one new token."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def maximum(self) -> Bucket:
        """The bucket that dominates every step within the limits."""
        return Bucket(
            "csu" if self.has_cache else "c--",
            self.max_num_batched_tokens,
            self.most_shared_blocks,
            self.max_unique_blocks,
            self.max_num_seqs,
            self.max_selected_blocks,
        )

    def phase_maximum(self, causal: bool, shared: bool, unique: bool, selected: bool = False) -> ForwardShape:
        """Returns the largest sizes of steps of one phase; without `c` every row is a request. Without a cache there is
        one phase.
        """
        if not self.has_cache:
            return self.maximum.forward
        return ForwardShape.from_sizes(
            causal,
            self.max_num_batched_tokens if causal else self.max_decode_rows,
            self.most_shared_blocks if shared else 0,
            self.max_unique_blocks if unique else 0,
            self.max_selected_blocks if selected else 0,
        )

    def allows(self, causal: bool, query_len: int, shared: int, unique: int, selected: int = 0) -> bool:
        """True if a step of these sizes can occur at all.

        A causal part has a request of two rows or more; a shared block has two rows; a unique block has a row of its
        own that does not belong to the causal request; the blocks are distinct blocks of one cache. Selected blocks may
        come with any of these: they are chosen for an existing row, and several requests may choose the same block.
        """
        if selected > self.max_selected_blocks:
            return False
        if not self.has_cache:
            return causal and not (shared or unique) and 1 <= query_len <= self.max_num_batched_tokens
        top = self.phase_maximum(causal, shared > 0, unique > 0)
        if query_len > top.query_len or shared > top.shared_blocks or unique > top.unique_blocks:
            return False
        if unique and causal and self.max_num_seqs == 1:
            return False
        if query_len < self._least_rows(causal, shared > 0, unique > 0):
            return False
        return self.contiguous or shared + unique <= self.max_context_blocks

    def _least_rows(self, causal: bool, shared: bool, unique: bool) -> int:
        if causal:
            return 3 if unique else 2
        return 2 if shared else 1


# The largest graph multiplies all rows by all shared blocks, although the contexts of several prompts have few pairs in
# common. Two long contexts fit in one step; more are rare, and run in parts.
SHARED_CONTEXTS = 2


def default_shared_blocks(max_model_len: int, block_size: int, strip: int = 0) -> int:
    """Returns the blocks of SHARED_CONTEXTS requests of `max_model_len` tokens, and at least the ranges of one."""
    blocks = SHARED_CONTEXTS * -(-max_model_len // block_size)
    return max(blocks, most_ranges(max_model_len, strip)) if strip else blocks


# A prefix that other requests have computed may have this many more ranges than strips. Each request that continued
# where another had ended adds one, as the turns of a conversation do.
SPARE_RANGES = 16


def strip_size(block_size: int) -> int:
    """Returns the slots of a strip: half a block, or the largest smaller size that divides it. So no context has more
    than twice as many ranges as it would have blocks, plus SPARE_RANGES, and half a strip of each request is empty on
    average.
    """
    return next((size for size in range(block_size // 2, 1, -1) if block_size % size == 0), 1)


def most_ranges(max_model_len: int, strip: int) -> int:
    """Returns the most ranges of blocks of a context of `max_model_len` tokens, if requests get strips."""
    return -(-max_model_len // strip) + SPARE_RANGES
