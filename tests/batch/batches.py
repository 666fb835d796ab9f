"""Batches as a scheduler could form them, and what each row of them must see: every position up to its own.

Nothing here knows the planner: a request is its tokens, its block table and how many tokens are computed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from vllm_gaudi_ucm.batch.batch_plan import BatchInput

# What stands in a block table beyond the tokens in use: as an index it would blow any array up.
POISON_BLOCK = np.iinfo(np.int32).max
MAX_PREFIX = 3


@dataclass(frozen=True)
class Request:
    """`computed` and `new` tokens; `behind` more are known and not scheduled; `prefix` blocks belong to a family.

    Other requests of the family have the same first blocks. The two families are copies of one prefix, computed at the
    same time, so prefix caching may hand out blocks of both: those at the indices `crossed` are the other family's.
    At most one request may still compute some of a family's blocks in this very step: vLLM lets a request hit blocks
    that another one fills in the same step.
    """

    computed: int
    new: int
    behind: int = 0
    prefix: int = 0
    family: int = 0
    crossed: frozenset[int] = frozenset()

    @property
    def num_tokens(self) -> int:
        return self.computed + self.new + self.behind

    def prefix_blocks(self) -> list[tuple[int, int]]:
        """(family, index) of its first blocks."""
        return [(self.family ^ (index in self.crossed), index) for index in range(self.prefix)]


@dataclass(frozen=True)
class Step:
    """A batch with physical blocks: `tables[i]` holds the blocks that request i reaches, block 0 is nobody's."""

    requests: list[Request]
    tables: list[list[int]]
    block_size: int
    num_blocks: int

    def batch_input(self, spare: int = 2) -> BatchInput:
        width = max((len(table) for table in self.tables), default=0) + spare
        tables = np.full((len(self.requests), width), POISON_BLOCK, np.int32)
        for row, table in enumerate(self.tables):
            tables[row, : len(table)] = table
        columns = ([r.computed for r in self.requests], [r.new for r in self.requests])
        computed, new, known = (np.array(c, np.int32) for c in (*columns, [r.num_tokens for r in self.requests]))
        return BatchInput(computed, new, known, (tables,))

    def place(self, request: int, position: int) -> tuple[int, int]:
        """(physical block, offset) of a token."""
        return self.tables[request][position // self.block_size], position % self.block_size

    def position(self, request: int, block: int, offset: int) -> int:
        """The token of a request that is there; a foreign block raises."""
        return self.tables[request].index(block) * self.block_size + offset


def steps(block_sizes: tuple[int, ...] = (1, 2, 4, 16), max_requests: int = 12) -> st.SearchStrategy[Step]:
    """Any mix of decodes, fresh prompts, partial chunks and multi-row verifies, in any order, with blocks shared by
    prefix and crosswise."""
    of_size = {size: st.lists(_requests(size), max_size=max_requests) for size in block_sizes}

    @st.composite
    def build(draw: st.DrawFn) -> Step:
        block_size = draw(st.sampled_from(block_sizes))
        requests = draw(of_size[block_size])
        return lay_out(_one_writer(requests, block_size), block_size, draw(st.integers(0, 1 << 16)))

    return build()


def _requests(block_size: int) -> st.SearchStrategy[Request]:
    # made once: hypothesis looks through each new strategy
    new_tokens = st.one_of(st.just(1), st.integers(2, 5), st.integers(1, 4 * block_size))
    more_tokens = st.one_of(st.just(0), st.integers(0, 2 * block_size))
    indices = st.frozensets(st.integers(0, MAX_PREFIX - 1))

    @st.composite
    def request(draw: st.DrawFn) -> Request:
        prefix, new = draw(st.integers(0, MAX_PREFIX)), draw(new_tokens)
        # tokens of the prefix that this request computes itself, now: the hit ends before them
        fills = draw(st.integers(0, min(new, prefix * block_size)))
        own = 0 if fills else draw(st.integers(0, 3 * block_size))
        behind, crossed = draw(more_tokens), draw(indices)
        return Request(prefix * block_size - fills + own, new, behind, prefix, draw(st.integers(0, 1)), crossed)

    return request()


def _one_writer(requests: list[Request], block_size: int) -> list[Request]:
    """Lets only the first request that computes a family's block do so; the others have it computed."""
    written: set[tuple[int, int]] = set()
    result = []
    for request in requests:
        fills = set(request.prefix_blocks()[request.computed // block_size :])
        if fills & written:
            request = replace(request, computed=request.prefix * block_size)
        else:
            written |= fills
        result.append(request)
    return result


def lay_out(requests: list[Request], block_size: int, seed: int) -> Step:
    """Gives every request its scattered physical blocks."""
    rng = random.Random(seed)
    counts = [-(-(request.computed + request.new) // block_size) for request in requests]
    num_blocks = 1 + 2 * MAX_PREFIX + sum(counts) + 5
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    families = [[free.pop() for _ in range(MAX_PREFIX)] for _ in range(2)]
    tables = []
    for request, count in zip(requests, counts, strict=True):
        prefix = [families[family][index] for family, index in request.prefix_blocks()[:count]]
        tables.append(prefix + [free.pop() for _ in range(count - len(prefix))])
    return Step(requests, tables, block_size, num_blocks)
