"""A worker's side of memory mode without a model: it keeps what each block would hold, and checks each order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_gaudi_ucm.protocol.attachments import sparse_meta_of
from vllm_gaudi_ucm.protocol.offload import BlockMove, OffloadReport

Content = tuple[int, ...]


class FakeWorker:
    """Tables and contents as a worker would have them: a block's content is the tokens up to its end.

    Args:
        rng: scores, and how long a move takes.
        fail_saves, fail_loads: probability that a move fails.
        delay: most steps that a move takes.
        windows: tokens of groups with windows, which stand before the one with whole contexts.
    """

    def __init__(
        self,
        rng: random.Random,
        fail_saves: float = 0.0,
        fail_loads: float = 0.0,
        delay: int = 0,
        block_size: int = 4,
        windows: Sequence[int] = (),
    ) -> None:
        self._windows = windows
        self.window_tables: list[dict[str, list[int]]] = [{} for _ in windows]
        self._rng = rng
        self._fail_saves, self._fail_loads, self._delay, self._block_size = fail_saves, fail_loads, delay, block_size
        self.tables: dict[str, list[int]] = {}
        self.content: dict[int, Content] = {}
        self._copies: dict[tuple[int, int], Content] = {}
        self._moving: list[tuple[int, bool, BlockMove]] = []
        self._rows: dict[tuple[int, int], int] = {}

    def step(self, output: SchedulerOutput, requests: Any) -> OffloadReport:
        """Carries out a step; returns its report."""
        report = OffloadReport()
        self._update_tables(output)
        meta = sparse_meta_of(output)
        assert meta is not None
        assert meta.offload is not None
        orders = meta.offload
        for generation in orders.ended:
            self._moving = [entry for entry in self._moving if entry[2].generation != generation]
            self._copies = {key: value for key, value in self._copies.items() if key[0] != generation}
            self._rows = {key: value for key, value in self._rows.items() if key[0] != generation}
        for pair in orders.dropped:
            del self._rows[pair], self._copies[pair]
        for patch in orders.patches:
            table = self.tables[patch.request_id]
            assert (table[patch.number] == 0) != (patch.block == 0), "a block leaves or comes back"
            table[patch.number] = patch.block
        for move in orders.saves:
            assert move.row not in self._rows.values(), "a row has one owner"
            self._rows[move.generation, move.number] = move.row
            self._copies[move.generation, move.number] = self.content[move.block]
            self._moving.append((self._rng.randint(0, self._delay), True, move))
        self._finish_moves(report)
        for move in orders.loads:
            assert self._rows[move.generation, move.number] == move.row
            self._moving.append((self._rng.randint(0, self._delay), False, move))
        assert set(orders.ahead) <= set(self._copies), "what is brought nearer has a copy"
        # each request as a division of its own: one that runs early must not need what a later one fills
        for request_id, scheduled in output.num_scheduled_tokens.items():
            self._write(request_id, scheduled, requests)
            self._check(request_id, requests)
        for request_id, generation in orders.scored.items():
            full = self._tokens(output, requests, request_id) // self._block_size
            report.scores[generation] = [self._rng.choice([-1.0, *[self._rng.random()] * 20]) for _ in range(full)]
        return report

    def _update_tables(self, output: SchedulerOutput) -> None:
        for group, tables in enumerate([*self.window_tables, self.tables]):
            for request_id in output.finished_req_ids:
                tables.pop(request_id, None)
            for new in output.scheduled_new_reqs:
                tables[new.req_id] = list(new.block_ids[group])
            cached = output.scheduled_cached_reqs
            for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
                if request_id in cached.resumed_req_ids:
                    tables[request_id] = []
                tables[request_id] += list(blocks[group]) if blocks is not None else []

    def _finish_moves(self, report: OffloadReport) -> None:
        waiting = []
        for steps, is_save, move in self._moving:
            pair = move.generation, move.number
            if steps:
                waiting.append((steps - 1, is_save, move))
            elif is_save:
                fails = self._rng.random() < self._fail_saves
                (report.unsaved if fails else report.saved).append(pair)
                if fails:
                    del self._rows[pair]
            elif self._rng.random() < self._fail_loads:
                report.failed.append(pair)
            else:
                self.content[move.block] = self._copies[pair]
                report.loaded.append(pair)
        self._moving = waiting

    def _tokens(self, output: SchedulerOutput, requests: Any, request_id: str) -> int:
        return min(int(requests[request_id].num_computed_tokens), int(requests[request_id].num_tokens))

    def poison(self, blocks: Iterable[int]) -> None:
        """These are free, and nobody finds them any more: nobody may read what was in them."""
        for block in blocks:
            self.content.pop(block, None)

    def _write(self, request_id: str, scheduled: int, requests: Any) -> None:
        """The scheduled tokens, in the blocks that the table names."""
        tokens, table = list(requests[request_id].all_token_ids), self.tables[request_id]
        end = requests[request_id].num_computed_tokens
        for position in range(end - scheduled, end):
            block = table[position // self._block_size]
            assert block, "nothing is written to a block that is away"
            self.content[block] = tuple(tokens[: position + 1])
        for group, tables in enumerate(self.window_tables):
            for position in range(end - scheduled, end):
                block = tables[request_id][position // self._block_size]
                assert block, "a window has its newest blocks"
                self.content[block] = _of_window(group, tokens[: position + 1])

    def _check(self, request_id: str, requests: Any) -> None:
        """Every block of a scheduled request is away, or holds what it should."""
        tokens = list(requests[request_id].all_token_ids)
        end = requests[request_id].num_computed_tokens
        for number, block in enumerate(self.tables[request_id][: -(-end // self._block_size)]):
            if block:
                upto = min(end, (number + 1) * self._block_size)
                assert self.content.get(block) == tuple(tokens[:upto]), f"{request_id} block {number}"
        for group, (window, tables) in enumerate(zip(self._windows, self.window_tables, strict=True)):
            for number in range(max(0, end - window) // self._block_size, -(-end // self._block_size)):
                wanted = _of_window(group, tokens[: min(end, (number + 1) * self._block_size)])
                found = self.content.get(tables[request_id][number])
                assert found == wanted, f"{request_id} block {number} of window {group}"


def _of_window(group: int, tokens: Sequence[int]) -> Content:
    """What no other group writes."""
    return -1 - group, *tokens
