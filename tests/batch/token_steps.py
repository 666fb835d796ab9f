"""Steps whose tokens have slots of their own, in any order, and what is in which tile."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from hypothesis import strategies as st

from tests.batch.batches import Step, steps
from vllm_gaudi_ucm.batch.batch_plan import BatchInput
from vllm_gaudi_ucm.batch.token_table import BEGIN, NEVER, TokenTable

LAYOUTS = ("contiguous", "descending", "interleaved", "disturbed", "scattered")


@dataclass(frozen=True)
class TokenStep(Step):
    """`tables[i]` holds the slots of request i as vLLM numbers them, and more than it reaches; blocks are tiles."""

    def batch_input(self, spare: int = 2) -> BatchInput:
        table = TokenTable(len(self.requests), self.block_size)
        for row, slots in enumerate(self.tables):
            table.append(row, slots)
        table.flush()
        columns = ([r.computed for r in self.requests], [r.new for r in self.requests])
        computed, new, known = (np.array(c, np.int32) for c in (*columns, [r.num_tokens for r in self.requests]))
        return BatchInput(computed, new, known, (table.blocks_of(np.arange(len(self.requests))),))

    def place(self, request: int, position: int) -> tuple[int, int]:
        return divmod(self.tables[request][position] + self.block_size - 1, self.block_size)

    def position(self, request: int, block: int, offset: int) -> int:
        return self.tables[request].index((block - 1) * self.block_size + offset + 1)


def by_token(step: Step) -> TokenStep:
    """The same places: slot `s` of block `b` is a slot of tile `b`."""
    size = step.block_size
    tables = [[(block - 1) * size + 1 + offset for block in table for offset in range(size)] for table in step.tables]
    return TokenStep(step.requests, tables, size, step.num_blocks)


def token_steps() -> st.SearchStrategy[TokenStep]:
    """Requests of `steps`, their slots laid out otherwise, in tiles that have nothing to do with what is shared."""

    @st.composite
    def build(draw: st.DrawFn) -> TokenStep:
        step = by_token(draw(steps((1, 4, 16), max_requests=8)))
        tables = lay_out_slots(step.tables, draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 1 << 16)))
        tile = draw(st.sampled_from((1, 2, 4, 16)))
        last = max((slot for table in tables for slot in table), default=1)
        return TokenStep(step.requests, tables, tile, 1 - (-last // tile))

    return build()


def lay_out_slots(tables: list[list[int]], layout: str, seed: int) -> list[list[int]]:
    """Gives the slots other numbers; equal ones stay equal."""
    rng = random.Random(seed)
    columns = zip_longest(*tables) if layout == "interleaved" else tables
    slots = list(dict.fromkeys(slot for column in columns for slot in column if slot is not None))
    numbers = list(range(1, len(slots) + 1))
    if layout == "descending":
        numbers.reverse()
    elif layout == "scattered":
        rng.shuffle(numbers)
    elif layout == "disturbed":
        for _ in range(1 + len(numbers) // 8):
            one, other = rng.randrange(len(numbers) or 1), rng.randrange(len(numbers) or 1)
            numbers[one : one + 1], numbers[other : other + 1] = numbers[other : other + 1], numbers[one : one + 1]
    begin = rng.randrange(20)
    renamed = {slot: begin + number for slot, number in zip(slots, numbers, strict=True)}
    return [[renamed[slot] for slot in table] for table in tables]


def slots_of(runs: np.ndarray, num_slots: int, tile: int) -> list[int]:
    """Every slot, as vLLM numbers it, from runs of one request."""
    used = [run for run in runs.tolist() if run[BEGIN] != NEVER]
    ends = [*(begin for _, begin, _ in used[1:]), num_slots][: len(used)]
    slots = []
    for (first, begin, step), end in zip(used, ends, strict=True):
        run = [first + step * offset for offset in range(end - begin)]
        assert run
        assert begin == len(slots)
        assert len({slot // tile for slot in run}) == 1, "a run lies in one tile"
        slots += [slot - tile + 1 for slot in run]
    return slots
