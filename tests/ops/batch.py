"""Flat batches built by brute force: requests, block tables, poisoned caches and the attention parts that follow.

Nothing here uses the planner or the operation under test. Every row also carries the keys and values it must see, so
the oracle knows only (request, position <= p).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SelectedPart,
    SharedGroup,
    SharedPart,
    UniquePart,
)
from vllm_gaudi_ucm.ops.unified_attention.spec import NOTHING_PER_HEAD, AttentionSpec, PerHead


@dataclass(frozen=True)
class Request:
    """`cached` computed and `new` scheduled tokens; the first `prefix` blocks of its context come from a family.

    The blocks at the indices `crossed` come from the other family: prefix caching may hand a request blocks of each of
    two equal prefixes. Of the blocks of its context, those at the indices `chosen` are in the selected part and those
    at `dropped`, which lie before any of its new tokens, are attended by none of its rows.
    """

    cached: int
    new: int
    prefix: int = 0
    family: int = 0
    crossed: frozenset[int] = frozenset()
    chosen: frozenset[int] = frozenset()
    dropped: frozenset[int] = frozenset()

    @property
    def context(self) -> int:
        """Tokens that its rows see in the cache."""
        return self.cached + 1 if self.new == 1 else self.cached


# How the caches lie in memory: each dense, views with holes between blocks, or each value behind its key with tokens or
# heads outermost in a block (vLLM's layouts LBNHC and LBHNC), or values that are the first elements of keys.
Memory = Literal["dense", "holes", "pairs by token", "pairs by head", "in keys"]


@dataclass(frozen=True)
class Shape:
    """How the tensors look; everything that does not decide who sees what."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    poison: float = float("nan")
    pads: int = 2
    contiguous: bool = False  # unique part as a slice of the cache
    loose: bool = False  # slices and groups cover more than what is seen
    memory: Memory = "dense"
    seed: int = 0


@dataclass
class Batch:
    """Tensors of a step, its parts, and per row the (keys, values) [tokens, kv_heads, dim] that it must see."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    parts: AttentionParts
    spec: AttentionSpec
    seen: list[tuple[Tensor, Tensor] | None]
    requests: list[Request] = field(default_factory=list)
    first_row: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    per_head: PerHead = NOTHING_PER_HEAD


def requests_strategy(block_size: int) -> st.SearchStrategy[list[Request]]:
    """Any mix of decodes, fresh prompts, chunks and multi-row verifies, with blocks shared by prefix and crosswise."""
    new_tokens = st.one_of(st.just(1), st.integers(2, 5), st.integers(1, 4 * block_size))

    @st.composite
    def request(draw: st.DrawFn) -> Request:
        prefix = draw(st.sampled_from([0, 1, 2, 3, 3]))
        cached = prefix * block_size + draw(st.integers(0, 3 * block_size))
        new = draw(new_tokens)
        crossed = draw(st.frozensets(st.integers(0, 2), max_size=prefix))
        return Request(cached, new, prefix, draw(st.integers(0, 1)), crossed)

    return st.lists(request(), max_size=7)


def sparse_requests_strategy(block_size: int) -> st.SearchStrategy[list[Request]]:
    """The same with any of a request's blocks in the selected part or in none."""

    @st.composite
    def sparse(draw: st.DrawFn) -> list[Request]:
        requests = []
        for request in draw(requests_strategy(block_size)):
            blocks = -(-request.context // block_size)
            chosen = draw(st.frozensets(st.integers(0, max(0, blocks - 1)), max_size=blocks))
            full = request.cached // block_size
            dropped = draw(st.frozensets(st.integers(0, max(0, full - 1)), max_size=full))
            requests.append(replace(request, chosen=chosen, dropped=dropped - chosen))
        return requests

    return sparse()


def build(requests: list[Request], shape: Shape) -> Batch:
    """Lays the requests out flat (single rows first), fills the caches and derives the parts by brute force."""
    requests = sorted(requests, key=lambda request: request.new != 1)
    random = torch.Generator().manual_seed(shape.seed)
    tables, num_blocks = _block_tables(requests, shape.block_size, random)
    key_cache, value_cache = _caches(num_blocks, shape)
    rows = sum(request.new for request in requests)
    total = rows + shape.pads

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).to(shape.dtype)

    in_keys = shape.memory == "in keys"
    query = randn(total, shape.heads, shape.dim)
    key, value = randn(total, shape.kv_heads, shape.dim), randn(total, shape.kv_heads, shape.value_dim)
    value = key[..., : shape.value_dim] if in_keys else value
    for tensor in (query, key, value):
        tensor[rows:] = shape.poison
    slots = torch.zeros(total, dtype=torch.int64)
    slots[rows:] = torch.arange(shape.pads) % shape.block_size
    seen: list[tuple[Tensor, Tensor] | None] = []
    first_row = []
    filled: set[tuple[int, int]] = set()
    for request, table in zip(requests, tables, strict=True):
        first = len(seen)
        first_row.append(first)
        places = [(table[p // shape.block_size], p % shape.block_size) for p in range(request.cached + request.new)]
        block, offset = (torch.tensor(column) for column in zip(*places, strict=True))
        # What another request has put into a shared block stays; everything else of the context is drawn now.
        old = [place for place in places[: request.cached] if place not in filled]
        filled.update(old)
        for old_block, old_offset in old:
            key_cache[old_block, old_offset] = randn(shape.kv_heads, shape.dim)
            if not in_keys:
                value_cache[old_block, old_offset] = randn(shape.kv_heads, shape.value_dim)
        span = slice(first, first + request.new)
        key_cache[block[request.cached :], offset[request.cached :]] = key[span]
        value_cache[block[request.cached :], offset[request.cached :]] = value[span]
        slots[span] = (block * shape.block_size + offset)[request.cached :]
        keys, values = key_cache[block, offset], value_cache[block, offset]
        kept = [p for p in range(len(places)) if p // shape.block_size not in request.dropped]
        for row in range(request.new):
            visible = (
                [p for p in kept if p <= request.cached + row] if request.dropped else slice(request.cached + row + 1)
            )
            seen.append((keys[visible], values[visible]))
    seen += [None] * shape.pads
    parts = _parts(requests, tables, num_blocks, shape, total, random)
    spec = AttentionSpec(shape.dim**-0.5, values_in_keys=in_keys)
    return Batch(query, key, value, key_cache, value_cache, slots, parts, spec, seen, requests, first_row, tables)


def _block_tables(requests: list[Request], block_size: int, random: torch.Generator) -> tuple[list[list[int]], int]:
    """Scattered physical blocks; block 0 is nobody's, and some blocks stay unused."""
    need = sum(-(-(request.cached + request.new) // block_size) for request in requests)
    num_blocks = 1 + 6 + need + 3
    free = (1 + torch.randperm(num_blocks - 1, generator=random)).tolist()
    families = [[free.pop() for _ in range(3)] for _ in range(2)]
    tables = []
    for request in requests:
        count = -(-(request.cached + request.new) // block_size)
        prefix = [families[request.family ^ (index in request.crossed)][index] for index in range(request.prefix)]
        tables.append(prefix + [free.pop() for _ in range(count - len(prefix))])
    return tables, num_blocks


def _caches(num_blocks: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Key and value cache [blocks, block_size, kv_heads, dim], full of poison."""
    dims = [shape.dim, shape.value_dim]
    if shape.memory == "pairs by token":
        pairs = _poison(num_blocks, shape.block_size, shape.kv_heads, sum(dims), shape=shape)
    elif shape.memory == "in keys":
        key_cache = _poison(num_blocks, shape.block_size, shape.kv_heads, shape.dim, shape=shape)
        return key_cache, key_cache[..., : shape.value_dim]
    elif shape.memory == "pairs by head":
        pairs = _poison(num_blocks, shape.kv_heads, shape.block_size, sum(dims), shape=shape).transpose(1, 2)
    else:
        holes = [_poison(num_blocks, 2, shape.block_size, shape.kv_heads, dim, shape=shape)[:, 1] for dim in dims]
        key_cache, value_cache = (cache if shape.memory == "holes" else cache.contiguous() for cache in holes)
        return key_cache, value_cache
    key_cache, value_cache = pairs.split(dims, dim=-1)
    return key_cache, value_cache


def _poison(*size: int, shape: Shape) -> Tensor:
    return torch.full(size, shape.poison, dtype=shape.dtype)


def _parts(
    requests: list[Request],
    tables: list[list[int]],
    num_blocks: int,
    shape: Shape,
    total: int,
    random: torch.Generator,
) -> AttentionParts:
    """Who sees what, from the definition: count the rows that use each block."""
    singles = sum(request.new == 1 for request in requests)
    users: dict[int, list[int]] = {}
    used: dict[tuple[int, int], int] = {}  # (request, block) -> tokens seen
    owner: list[int] = []
    for index, (request, table) in enumerate(zip(requests, tables, strict=True)):
        for position, block in enumerate(table):
            tokens = min(shape.block_size, request.context - position * shape.block_size)
            if tokens > 0 and position not in request.chosen | request.dropped:
                used[index, block] = tokens
                users.setdefault(block, []).extend(range(len(owner), len(owner) + request.new))
        owner += [index] * request.new
    owner += [len(requests)] * shape.pads
    causal = _causal(requests, total, shape) if any(request.new > 1 for request in requests) else None
    shared = [block for block, rows in users.items() if len(rows) > 1]
    unique = [block for block, rows in users.items() if len(rows) == 1]
    return AttentionParts(
        causal,
        _shared(shared, users, used, owner, len(requests), shape, total) if shared else None,
        _unique(unique, users, used, owner, num_blocks, singles, shape, random) if unique else None,
        _selected(requests, tables, shape, random) if any(request.chosen for request in requests) else None,
    )


def _causal(requests: list[Request], total: int, shape: Shape) -> CausalPart:
    groups = torch.full((total,), -1, dtype=torch.int32)
    slices = []
    first = 0
    for index, request in enumerate(requests):
        if request.new > 1:
            groups[first : first + request.new] = index
            for lo in range(first, first + request.new, 4):
                hi = min(lo + 4, first + request.new)
                slices.append(CausalSlice(lo, hi, first, hi))
        first += request.new
    if shape.loose:
        slices = [CausalSlice(lo, min(lo + 5, total), 0, total) for lo in range(0, total, 5)]
    return CausalPart(groups, tuple(slices))


def _shared(
    blocks: list[int],
    users: dict[int, list[int]],
    used: dict[tuple[int, int], int],
    owner: list[int],
    spans: int,
    shape: Shape,
    total: int,
) -> SharedPart:
    blocks = sorted(blocks, key=lambda block: users[block])
    hi = torch.zeros((spans + 1, len(blocks)), dtype=torch.int32)
    for (request, block), tokens in used.items():
        if block in blocks:
            hi[request, blocks.index(block)] = tokens
    groups = []
    if shape.loose:
        groups = [SharedGroup(torch.arange(total), 0, len(blocks))]
    else:
        lo = 0
        for end in range(1, len(blocks) + 1):
            if end == len(blocks) or users[blocks[end]] != users[blocks[lo]]:
                groups.append(SharedGroup(torch.tensor(users[blocks[lo]]), lo, end))
                lo = end
    return SharedPart(torch.tensor(blocks), torch.tensor(owner), torch.zeros_like(hi), hi, tuple(groups))


def _unique(
    blocks: list[int],
    users: dict[int, list[int]],
    used: dict[tuple[int, int], int],
    owner: list[int],
    num_blocks: int,
    singles: int,
    shape: Shape,
    random: torch.Generator,
) -> UniquePart:
    if shape.contiguous:
        entries = {block: block for block in blocks}
        count, ids = num_blocks, None
    else:
        order = torch.randperm(len(blocks) + 2, generator=random).tolist()  # two pads point at the dummy block
        entries = {block: order[index] for index, block in enumerate(blocks)}
        count, ids = len(order), torch.zeros(len(order), dtype=torch.int64)
    rows = torch.zeros(count, dtype=torch.int64)
    hi = torch.zeros(count, dtype=torch.int32)
    for block, entry in entries.items():
        rows[entry] = users[block][0]
        hi[entry] = used[owner[users[block][0]], block]
        if ids is not None:
            ids[entry] = block
    return UniquePart(ids, rows, torch.zeros_like(hi), hi, singles)


def _selected(requests: list[Request], tables: list[list[int]], shape: Shape, random: torch.Generator) -> SelectedPart:
    """Entries in any order, with two pads at the dummy block; the last span is a pad, at a row of somebody."""
    first_rows, num_rows, entries = [], [], []
    first = 0
    for request, table in zip(requests, tables, strict=True):
        if request.chosen:
            for index in request.chosen:
                hi = min(shape.block_size, request.context - index * shape.block_size)
                entries.append((table[index], len(first_rows), hi))
            first_rows.append(first)
            num_rows.append(request.new)
        first += request.new
    entries += [(0, 0, 0), (0, len(first_rows), 0)]
    order = torch.randperm(len(entries), generator=random)
    blocks, spans, hi = torch.tensor(entries)[order].T.contiguous()
    max_rows = max(num_rows) + shape.loose
    return SelectedPart(blocks, spans, hi, torch.tensor([*first_rows, 0]), torch.tensor([*num_rows, 0]), max_rows)
