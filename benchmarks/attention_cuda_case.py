"""The batches of the attention table on a GPU: data, the parts as a bucket has them, and exact rows to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.unified_attention.parts import (
    AttentionParts,
    CausalPart,
    CausalSlice,
    SharedGroup,
    SharedPart,
    UniquePart,
)
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec, PerHead

SLICE = 512
NO_GROUP = -1


@dataclass(frozen=True)
class Model:
    """Head counts and sizes; the default is an 8B Llama.

    window: tokens that a row sees, 0 for all. cap: soft cap, 0 for none. latent: elements of a key that are its value,
    too, 0 where values are tensors of their own. slopes: by distance (ALiBi). narrow: the cache is 8-bit floats.
    """

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 128
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    latent: int = 0
    slopes: bool = False
    narrow: bool = False

    @property
    def value_dim(self) -> int:
        return self.latent or self.dim

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.dim**-0.5,
            self.cap or None,
            is_local=bool(self.window),
            has_sinks=self.sinks,
            has_slopes=self.slopes,
            values_in_keys=bool(self.latent),
        )

    def first_seen(self, position: int) -> int:
        """The first position that the row at this one sees."""
        return max(0, position - self.window + 1) if self.window else 0


@dataclass(frozen=True)
class Request:
    """`new` tokens after `cached` ones, the first `prefix` of which all requests share; whole blocks only."""

    cached: int
    new: int
    prefix: int = 0


@dataclass(frozen=True)
class Case:
    """A row of the table; the goal is in milliseconds."""

    name: str
    requests: tuple[Request, ...]
    goal: float


CASES = (
    Case("decode 64 x 8192", (Request(8191, 1),) * 64, 0.58),
    Case("shared prefix 64, 8192 + 512", (Request(8192 + 511, 1, 8192),) * 64, 0.08),
    Case("mixed 2048 + 32 x 4096", (*(Request(4095, 1),) * 32, Request(0, 2048)), 0.30),
    Case("prefill 1 x 8192", (Request(0, 8192),), 1.05),
    Case("packed 16 x 512", (Request(0, 512),) * 16, 0.12),
)


@dataclass(frozen=True)
class Batch:
    """A case on the device. caches: key and value [blocks, block_size, kv_heads, dim], as engines have them.

    tables: int32 [requests, blocks]; block 0 where no row sees a token. per_head: sinks and slopes. bytes, flops: the
    least that must be moved and computed.
    """

    model: Model
    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    caches: tuple[Tensor, Tensor]
    tables: Tensor
    parts: AttentionParts
    per_head: PerHead
    bytes: int
    flops: int

    def out(self) -> Tensor:
        """Memory for a result."""
        return self.query.new_empty(*self.query.shape[:2], self.model.value_dim)

    def exact(self, row: int) -> Tensor:
        """float64 [heads, dim]: attention of one row by definition."""
        first = 0
        for index, request in enumerate(self.case.requests):
            if row < first + request.new:
                return self._exact(index, row, request.cached + row - first + 1)
            first += request.new
        raise IndexError(row)

    def _exact(self, index: int, row: int, tokens: int) -> Tensor:
        model, size = self.model, self.model.block_size
        first = model.first_seen(tokens - 1)
        blocks = self.tables[index, first // size : -(-tokens // size)].long()
        seen = slice(first % size, tokens - first // size * size)
        keys, values = (cache[blocks].flatten(0, 1)[seen].double() for cache in self.caches)
        query = self.query[row].double().view(model.kv_heads, -1, model.dim)
        scores = torch.einsum("hgd,thd->hgt", query, keys) * model.spec.scale
        if model.cap:
            scores = model.cap * (scores / model.cap).tanh()
        if (slopes := self.per_head.slopes) is not None:
            away = torch.arange(tokens - first - 1, -1, -1, device=scores.device)
            scores = scores - slopes.double().view(model.kv_heads, -1, 1) * away
        if (sinks := self.per_head.sinks) is not None:
            scores = torch.cat((scores, sinks.double().view(model.kv_heads, -1, 1)), -1)
        weights = torch.softmax(scores, -1)[..., : tokens - first]
        return torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1)


def make_batch(case: Case, model: Model, device: torch.device) -> Batch:
    """Random data in scattered blocks; the new tokens are in the cache already."""
    torch.manual_seed(0)
    tables, num_blocks = _tables(case, model, device)
    heads, dtype = model.kv_heads, model.dtype
    size, cached = (num_blocks, model.block_size, heads, model.dim), torch.float8_e4m3fn if model.narrow else dtype
    keys = torch.randn(*size, device=device, dtype=dtype).to(cached)
    values = keys[..., : model.latent] if model.latent else torch.randn(*size, device=device, dtype=dtype).to(cached)
    caches = keys, values
    rows = sum(request.new for request in case.requests)
    query = torch.randn(rows, model.heads, model.dim, device=device, dtype=dtype)
    new = torch.empty(rows, heads, model.dim, device=device, dtype=dtype)
    pair = new, new[..., : model.latent] if model.latent else torch.empty_like(new)
    first = 0
    for table, request in zip(tables, case.requests, strict=True):
        position = torch.arange(request.cached, request.cached + request.new, device=device)
        block = table[position // model.block_size].long()
        for cache, tokens in zip(caches, pair, strict=True):
            tokens[first : first + request.new] = cache[block, position % model.block_size]
        first += request.new
    sinks = torch.randn(model.heads, device=device) if model.sinks else None
    slopes = 2.0 ** (-8 * torch.arange(1, model.heads + 1, device=device) / model.heads) if model.slopes else None
    # a model with windows or slopes is planned, see `attention_cuda_rows`
    is_planned = model.window or model.slopes
    parts = AttentionParts() if is_planned else _parts(case, tables.cpu(), model.block_size, device)
    return Batch(model, case, query, *pair, caches, tables, parts, PerHead(sinks, slopes), *_least(case, model))


def _tables(case: Case, model: Model, device: torch.device) -> tuple[Tensor, int]:
    size = model.block_size
    # blocks before a window are freed
    begins = [model.first_seen(request.cached) // size for request in case.requests]
    need = [-(-(request.cached + request.new) // size) for request in case.requests]
    prefix = case.requests[0].prefix // size
    assert not (prefix and model.window), "shared windows have no case"
    own = [count - max(prefix, begin) for count, begin in zip(need, begins, strict=True)]
    num_blocks = 1 + prefix + sum(own)
    free = 1 + torch.randperm(num_blocks - 1)
    tables = torch.zeros(len(need), max(need), dtype=torch.int32)
    taken = prefix
    for table, count, mine in zip(tables, need, own, strict=True):
        table[:prefix] = free[:prefix]
        table[count - mine : count] = free[taken : taken + mine]
        taken += mine
    return tables.to(device), num_blocks


def _parts(case: Case, tables: Tensor, block_size: int, device: torch.device) -> AttentionParts:
    """Makes parts like `execution/graph_manager.py`: the rows of a request and the users of a block are only data."""
    new = torch.tensor([request.new for request in case.requests])
    rows = int(new.sum())
    groups = torch.arange(len(new)).masked_fill(new == 1, NO_GROUP).repeat_interleave(new)
    causal = shared = unique = None
    if bool((new > 1).any()):
        ends = [(lo, min(lo + SLICE, rows)) for lo in range(0, rows, SLICE)]
        causal = CausalPart(groups.to(device), tuple(CausalSlice(lo, hi, 0, hi) for lo, hi in ends))
    prefix = case.requests[0].prefix // block_size
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    if prefix:
        hi = torch.full((len(new) + 1, prefix), block_size, device=device)
        hi[-1] = 0
        spans = torch.arange(len(new)).repeat_interleave(new).to(device)
        every = SharedGroup(torch.arange(rows, device=device), 0, prefix)
        shared = SharedPart(tables[0, :prefix].long().to(device), spans, zero.expand(hi.shape), hi, (every,))
    entries = [
        (int(tables[index, column]), index, min(block_size, request.cached + 1 - column * block_size))
        for index, request in enumerate(case.requests)
        if request.new == 1
        for column in range(prefix, -(-(request.cached + 1) // block_size))
    ]
    if entries:
        blocks, owners, ends_of = torch.tensor(entries).T.contiguous().to(device)
        unique = UniquePart(blocks, owners, zero.expand(ends_of.shape), ends_of, int((new == 1).sum()))
    return AttentionParts(causal, shared, unique)


def _least(case: Case, model: Model) -> tuple[int, int]:
    """Bytes: query and result, and every key and value in use once. FLOPs: two products per pair that is seen."""
    prefix = case.requests[0].prefix
    tokens, pairs, rows = prefix, 0, 0
    for request in case.requests:
        end = request.cached + request.new
        tokens += end - max(prefix, model.first_seen(request.cached))
        pairs += sum(position + 1 - model.first_seen(position) for position in range(request.cached, end))
        rows += request.new
    size, both = model.dtype.itemsize, model.dim + model.value_dim
    cached = (model.dim if model.latent else both) * tokens * model.kv_heads
    moved = cached * (1 if model.narrow else size) + both * rows * model.heads * size
    return moved, 2 * both * pairs * model.heads
