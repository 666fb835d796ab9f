"""A second replica of vllm-gaudi's look-up, as plain as it can be: lists, loops, nothing remembered."""

from __future__ import annotations

import math
from collections import Counter

from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import Prepared, Shape
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Step


def up(size: int, step: int) -> int:
    if size <= 1:
        return size
    width = math.ceil(math.pow(size, 1 / 3)) * step
    return -(-size // width) * width


class PlainServer:
    """The process of one rank without drafts. shapes: what ran, and how often. fresh: shapes compiled on the way."""

    def __init__(self, prepared: Prepared, settings: Settings) -> None:
        self.s = settings
        self.prompts, self.decodes = list(prepared.prompts), list(prepared.decodes)
        self.most = max(shape[2] for shape in self.decodes)
        self.warm = {*self.prompts, *self.decodes}
        self.shapes: Counter[Shape] = Counter()
        self.fresh: list[Shape] = []

    def find(self, buckets: list[Shape], wanted: Shape, cap: int) -> Shape:
        for shape in sorted(buckets):
            if shape >= wanted and all(have >= need for have, need in zip(shape, wanted, strict=True)):
                return shape
        query = wanted[1] if wanted[1] == 1 else up(wanted[1], max(32, self.s.hybrid_chunk))
        new = (
            min(up(wanted[0], 2), self.s.max_num_seqs),
            min(query, self.s.max_num_batched_tokens),
            min(up(wanted[2], 32), cap),
        )
        buckets.append(new)
        return new

    def prompt(self, *wanted: int) -> Shape:
        return self.find(self.prompts, (wanted[0], wanted[1], wanted[2]), -(-(self.s.max_model_len - 1) // 128))

    def decode(self, batch: int, blocks: int) -> Shape:
        return self.find(self.decodes, (batch, 1, min(blocks, self.most)), self.most)

    def step(self, step: Step) -> None:
        groups: list[list[tuple[int, int]]] = [[]]
        for query, computed in step.prefills:
            last = groups[-1]
            alone = bool(last) and (computed > 0 or last[0][1] > 0)
            if alone or self.s.hybrid_chunk or len(last) + 1 > self.s.prefill_batch:
                groups.append([(query, computed)])
                continue
            batch, longest, _ = self.prompt(len(last) + 1, max([query, *(q for q, _ in last)]), 0)
            if batch <= self.s.prefill_batch and batch * longest <= self.s.max_num_batched_tokens:
                last.append((query, computed))
            else:
                groups.append([(query, computed)])
        for group in filter(None, groups):
            self.ran(self.prompt(len(group), max(q for q, _ in group), max(-(-c // 128) for _, c in group)))
        if step.decodes:
            batch = self.decode(step.decodes, step.blocks)[0]
            wanted = step.highest if self.s.contiguous else step.blocks
            self.ran((batch, 1, max(self.decode(batch, wanted)[2], wanted if self.s.contiguous else 0)))

    def ran(self, shape: Shape) -> None:
        self.shapes[shape] += 1
        if shape not in self.warm:
            self.warm.add(shape)
            self.fresh.append(shape)
