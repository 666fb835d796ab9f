"""Steps in the buckets of a vllm-gaudi server: which shapes run, how much they pad, what is compiled while serving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from vllm_gaudi_ucm_tools.vllm_gaudi.look_up import LookUp
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import Prepared, Shape
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Prefill, Step

# A rank without a prompt computes one of this many tokens while others have prompts.
IDLE_QUERY = 128
REPORT_EVERY = 500


class Wanted(NamedTuple):
    """A prefill or the decodes of a step, before padding.

    shape: what the look-up is for: (requests, longest query, longest context in blocks), or (requests, 1, blocks),
        of which decodes count the highest block id with contiguous reading.
    rows, blocks: what has to be computed: tokens, and blocks of their contexts.
    """

    phase: str
    shape: Shape
    rows: int
    blocks: int


class Ran(NamedTuple):
    """A prefill or decodes, and the shape that they ran in."""

    wanted: Wanted
    shape: Shape


@dataclass
class Outcome:
    """Counts of what ran. compiled: shapes that no bucket had prepared, in order; each is compiled at its first run.
    added: buckets that look-ups added, of which some never ran.
    """

    ran: Counter[Ran] = field(default_factory=Counter)
    compiled: list[tuple[str, Shape]] = field(default_factory=list)
    added: int = 0


def replay(
    steps: Sequence[tuple[Step, ...]],
    prepared: Prepared,
    settings: Settings,
    report: Callable[[float], None] = lambda done: None,
) -> Outcome:
    """Runs steps in order through a server that has prepared these buckets."""
    server = _Server(prepared, settings)
    # what equal steps run as, until a look-up adds a bucket
    known: dict[tuple[Step, ...], list[Ran]] = {}
    added = 0
    for number, ranks in enumerate(steps):
        same = known.get(ranks)
        if same is None:
            same = server.run(ranks)
            if server.num_added > added:
                added = server.num_added
                known.clear()
            else:
                known[ranks] = same
        for ran in same:
            server.outcome.ran[ran] += 1
        if number % REPORT_EVERY == 0:
            report(number / len(steps))
    report(1.0)
    server.outcome.added = server.num_added
    return server.outcome


class _Server:
    """The processes of all ranks. Each has buckets of its own; padded sizes are the largest of all ranks."""

    def __init__(self, prepared: Prepared, settings: Settings) -> None:
        self._settings = settings
        self.look_ups = [LookUp(prepared, settings) for _ in range(settings.ranks)]
        self.outcome = Outcome()
        self._warm = {("prompt", shape) for shape in prepared.prompts} | {("decode", s) for s in prepared.decodes}

    @property
    def num_added(self) -> int:
        """Returns how many buckets look-ups have added."""
        return sum(len(look_up.added) for look_up in self.look_ups)

    def run(self, ranks: tuple[Step, ...]) -> list[Ran]:
        """Returns what a step runs."""
        found: list[Ran] = []
        batches = [self._merged(step.prefills, look_up) for step, look_up in zip(ranks, self.look_ups, strict=True)]
        idle = Wanted("prompt", (1, IDLE_QUERY, 0), 0, 0)
        for row in zip_longest(*batches, fillvalue=idle):
            shapes = [look_up.prompt(*wanted.shape) for wanted, look_up in zip(row, self.look_ups, strict=True)]
            batch, query, context = map(max, zip(*shapes, strict=True))
            found += self._ran(row, (batch, query, context))
        if any(step.decodes for step in ranks):
            found += self._decode(ranks)
        return found

    def _merged(self, prefills: Sequence[Prefill], look_up: LookUp) -> list[Wanted]:
        """Returns the prefills as batches, each merged with those before it if it may."""
        batches: list[list[Prefill]] = [[]]
        for prefill in prefills:
            if self._may_join(batches[-1], prefill, look_up):
                batches[-1].append(prefill)
            else:
                batches.append([prefill])
        return [prefill_wanted(batch, self._settings.block_size) for batch in batches if batch]

    def _may_join(self, batch: list[Prefill], prefill: Prefill, look_up: LookUp) -> bool:
        settings = self._settings
        history = any(other.computed for other in batch) or (batch and prefill.computed)
        if settings.hybrid_chunk or history or len(batch) >= settings.prefill_batch:
            return False
        # the look-up may add a bucket although the prompts are not merged then
        longest = max(prefill.query, *(other.query for other in batch)) if batch else prefill.query
        count, query, _ = look_up.prompt(len(batch) + 1, longest, 0)
        return count <= settings.prefill_batch and count * query <= settings.max_num_batched_tokens

    def _decode(self, ranks: tuple[Step, ...]) -> list[Ran]:
        live = [(step, look_up) for step, look_up in zip(ranks, self.look_ups, strict=True) if step.decodes]
        tokens = max(step.tokens for step, _ in live)
        batch = max(look_up.decode(step.decodes, step.blocks, tokens > 1)[0] for step, look_up in live)
        wanted = [decode_wanted(step, self._settings.contiguous) for step, _ in live]
        blocks = max(
            look_up.decode(batch * tokens, own.shape[2])[2] for own, (_, look_up) in zip(wanted, live, strict=True)
        )
        if self._settings.contiguous:
            blocks = max(blocks, *(own.shape[2] for own in wanted))
        return self._ran(wanted, (batch * tokens, 1, blocks))

    def _ran(self, row: Sequence[Wanted], shape: Shape) -> list[Ran]:
        key = (row[0].phase, shape)
        if key not in self._warm:
            self._warm.add(key)
            self.outcome.compiled.append(key)
        return [Ran(wanted, shape) for wanted in row]


def prefill_wanted(batch: Sequence[Prefill], block_size: int) -> Wanted:
    """Returns a merged batch of prompts as it is looked up."""
    context = max(-(-prefill.computed // block_size) for prefill in batch)
    rows = sum(prefill.query for prefill in batch)
    return Wanted("prompt", (len(batch), max(prefill.query for prefill in batch), context), rows, context)


def decode_wanted(step: Step, contiguous: bool) -> Wanted:
    """Returns the decodes of a step as their blocks are looked up. Without a known highest block it is the lowest
    possible one.
    """
    tokens = step.tokens
    blocks = max(step.highest, step.blocks + 1 if not step.highest else 0) if contiguous else step.blocks * tokens
    # contiguous reading takes a block once for all tokens of its request
    read = step.blocks if contiguous else step.blocks * tokens
    return Wanted("decode", (step.decodes * tokens, 1, blocks), step.decodes * tokens, read)
