"""How a running vllm-gaudi finds a bucket: the first one in order that covers a step, or a new one."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import Prepared, Shape

NewBucket = Callable[[Shape], Shape]
BATCH_STEP, QUERY_STEP, BLOCK_STEP = 2, 32, 32


def fallback_value(size: int, step: int) -> int:
    """Returns the size of a new bucket, a multiple of a width that grows with the cube root of `size`."""
    if size <= 1:
        return size
    # the float root of a cube may lie just above its integer, which then counts as one more
    width = math.ceil(math.pow(size, 1 / 3)) * step
    return math.ceil(size / width) * width


class LookUp:
    """The sorted buckets of a server's process. A step that none covers adds one, which later steps find.

    Args:
        prepared: the buckets at its start.
        settings: of the server.
    """

    def __init__(self, prepared: Prepared, settings: Settings) -> None:
        self._settings = settings
        self.prompts, self.decodes = list(prepared.prompts), list(prepared.decodes)
        self._seeds = list(prepared.seeds)
        self._most_decode_blocks = max(context for _, _, context in prepared.decodes)
        self.added: list[Shape] = []
        self._known: dict[tuple[str, Shape], Shape] = {}

    def prompt(self, batch: int, query: int, context: int) -> Shape:
        """Returns the bucket of a prefill; it may be new."""
        return self._find("prompt", (batch, query, context), self.prompts, self._new_prompt)

    def decode(self, batch: int, blocks: int, seeded: bool = False) -> Shape:
        """Returns the bucket of decodes; it may be new. seeded: look first among buckets without those for drafts."""
        wanted = (batch, 1, min(blocks, self._most_decode_blocks) if self._most_decode_blocks > 0 else blocks)
        if seeded and (found := _first_covering(self._seeds, wanted)) is not None:
            return found
        return self._find("decode", wanted, self.decodes, self._new_decode)

    def _find(self, phase: str, wanted: Shape, buckets: list[Shape], new: NewBucket) -> Shape:
        if (known := self._known.get((phase, wanted))) is not None:
            return known
        found = _first_covering(buckets, wanted)
        if found is None:
            found = new(wanted)
            if phase == "prompt" or found not in buckets:
                insort(buckets, found)
                self.added.append(found)
            # a new bucket may come before the ones that were found so far
            self._known.clear()
            return found
        self._known[phase, wanted] = found
        return found

    def _new_prompt(self, wanted: Shape) -> Shape:
        context = min(fallback_value(wanted[2], BLOCK_STEP), self._settings.most_context)
        return self._new_batch(wanted[0]), self._new_query(wanted[1]), context

    def _new_decode(self, wanted: Shape) -> Shape:
        blocks = fallback_value(wanted[2], BLOCK_STEP)
        if self._most_decode_blocks > 0:
            blocks = min(blocks, self._most_decode_blocks)
        return self._new_batch(wanted[0]), self._new_query(1), blocks

    def _new_batch(self, batch: int) -> int:
        return min(fallback_value(batch, BATCH_STEP), self._settings.max_num_seqs)

    def _new_query(self, query: int) -> int:
        slices = self._settings.slices
        if slices is not None and query >= slices[0]:
            return math.ceil(query / slices[1]) * slices[1]
        step = max(QUERY_STEP, self._settings.hybrid_chunk)
        return min(fallback_value(query, step), self._settings.max_num_batched_tokens)


def _first_covering(buckets: Sequence[Shape], wanted: Shape) -> Shape | None:
    """Returns the first bucket in the order of (batch, query, blocks) with no size below the wanted one."""
    _, query, blocks = wanted
    place = bisect_left(buckets, wanted)
    while place < len(buckets):
        found = buckets[place]
        if found[1] < query:
            place = bisect_left(buckets, (found[0], query, blocks), place + 1)
        elif found[2] < blocks:
            place = bisect_left(buckets, (found[0], found[1], blocks), place + 1)
        else:
            return found
    return None
