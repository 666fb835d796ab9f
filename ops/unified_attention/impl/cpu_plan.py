"""The parts of a step as calls of torch's CPU flash kernel, formed once per step; they depend on the parts alone.

Causal groups become squares; what a row or a shared group reads from the cache becomes an `Item`, and items of similar
length are batched into one `BlockCall`, whatever part they come from.
"""

from __future__ import annotations

import math

import torch

from vllm_gaudi_ucm.ops.unified_attention.impl.cpu_call import BlockCall, CausalCall, Plan, as_run, range_bias
from vllm_gaudi_ucm.ops.unified_attention.impl.cpu_items import Entries, Item, add_shared_items, add_unique_items
from vllm_gaudi_ucm.ops.unified_attention.parts import AttentionParts, CausalPart

# Measured on AVX-512 cores with 9 query and 3 kv heads of 64: benchmarks/attention_cpu.py.
WASTE_TOKENS = 256  # tokens of padding that cost about as much as one more call
CALL_TOKENS = 2048  # gathered per call; more, and the copies fall out of cache and cost page faults every time

# The kernel's loop over scores without a bias drops NaN when there is less than one vector of them: a row whose scores
# are all NaN came out as zeros (torch 2.13). With a bias it does not.
SHORT = 16


def plan(parts: AttentionParts, block_size: int) -> Plan:
    """Turns the parts of a step into calls; reads them on the host."""
    causal = _causal_calls(parts.causal) if parts.causal is not None else ()
    items: list[Item] = []
    pieces: list[Entries] = []
    masked: list[BlockCall] = []
    if parts.unique is not None:
        add_unique_items(parts.unique, block_size, items, pieces)
    shared = parts.shared
    for group in shared.groups if shared is not None else ():
        assert shared is not None
        add_shared_items(shared, group, block_size, items, pieces, masked)
    calls = masked
    if items:
        entries = Entries(*(torch.cat(column) for column in zip(*pieces, strict=True)))
        calls = [*_batch(items, entries, block_size), *masked]
    return _mark_fresh(causal, calls)._replace(selected=parts.selected is not None)


def _causal_calls(part: CausalPart) -> tuple[CausalCall, ...]:
    """Squares of the groups; adjacent squares of equal length are one call. The slices bound nothing tighter."""
    ids, counts = torch.unique_consecutive(part.groups, return_counts=True)
    calls: list[CausalCall] = []
    first = 0
    for group, length in zip(ids.tolist(), counts.tolist(), strict=True):
        last = calls[-1] if calls else None
        if group >= 0 and last is not None and last.length == length and last.first + last.squares * length == first:
            calls[-1] = last._replace(squares=last.squares + 1)
        elif group >= 0:
            bias = torch.full((length, length), -math.inf).triu(1) if length < SHORT else None
            calls.append(CausalCall(first, 1, length, bias[None, None] if bias is not None else None))
        first += length
    return tuple(calls)


def _batch(items: list[Item], entries: Entries, block_size: int) -> list[BlockCall]:
    """Batches items with equally many rows and similar length, the longest first.

    No row twice in a batch: a call writes each of its rows once, and what comes later is merged by a later call.
    """
    batches: list[list[Item]] = []
    taken: set[int] = set()
    waste = 0
    for item in sorted(items, key=lambda item: (len(item.rows), -item.tokens)):
        head = batches[-1][0] if batches else None
        waste += head.tokens - item.tokens if head is not None else 0
        fits = (
            head is not None
            and len(head.rows) == len(item.rows)
            and waste <= WASTE_TOKENS
            and taken.isdisjoint(item.rows)
            and (len(batches[-1]) + 1) * head.tokens <= CALL_TOKENS
        )
        if fits:
            batches[-1].append(item)
        else:
            batches.append([item])
            taken = set()
            waste = 0
        taken.update(item.rows)
    return [_block_call(sorted(batch), entries, block_size) for batch in batches]


def _block_call(batch: list[Item], entries: Entries, block_size: int) -> BlockCall:
    """Pads the items' blocks to the longest; a pad repeats the item's first block and has an empty range."""
    tokens = max(item.tokens for item in batch)
    start = torch.tensor([[item.start] for item in batch])
    count = torch.tensor([[item.blocks] for item in batch])
    column = torch.arange(int(count.max()))
    pad = column >= count
    index = start + torch.where(pad, 0, column)
    bias = range_bias(entries.lo[index].masked_fill(pad, 0), entries.hi[index].masked_fill(pad, 0), block_size)[
        :, :tokens
    ]
    rows = torch.tensor([row for item in batch for row in item.rows])
    blocks = entries.blocks[index].flatten()
    return BlockCall(
        as_run(rows),
        len(batch),
        len(batch[0].rows),
        as_run(blocks) if len(batch) == 1 else blocks,
        tokens,
        bias[:, None, None].contiguous() if tokens < SHORT or bool((bias != 0).any()) else None,
        False,
    )


def _mark_fresh(causal: tuple[CausalCall, ...], calls: list[BlockCall]) -> Plan:
    written = {row for call in causal for row in range(call.first, call.first + call.squares * call.length)}
    fresh = len(written)
    marked = []
    for call in calls:
        rows = call.rows
        mine = set(range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist())
        is_fresh = written.isdisjoint(mine)
        fresh += len(mine) if is_fresh else 0
        written |= mine
        marked.append(call._replace(fresh=is_fresh))
    merges = any(not call.fresh for call in marked)
    return Plan(causal, tuple(marked), fresh, merges, {})
