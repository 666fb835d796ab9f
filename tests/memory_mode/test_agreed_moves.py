"""Copies of several workers: what becomes of one is the same on all of them, in the same step."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vllm_gaudi_ucm.distributed.ranks import Ranks
from vllm_gaudi_ucm.memory_mode.agreed_moves import AgreedMoves, EndedMove


class ThreadRanks:
    """Ranks that are threads of this process: the collective of `Ranks`."""

    def __init__(self, size: int) -> None:
        self._values: list[Sequence[int]] = [()] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def of(self, rank: int) -> Any:
        def least_of(values: Sequence[int]) -> list[int]:
            self._values[rank] = values
            self._barrier.wait()
            found = [min(column) for column in zip(*self._values, strict=True)]
            self._barrier.wait()
            return found

        ranks = Ranks(rank, len(self._values))
        object.__setattr__(ranks, "least_of", least_of)
        return ranks


def history(moves: AgreedMoves, rank: int, steps: int = 60) -> tuple[list[Any], list[Any]]:
    """Random orders, which are the same on all ranks, and random ends, which are not."""
    orders, own = random.Random(5), random.Random(100 + rank)
    under_way: dict[tuple[int, int], bool] = {}
    seen, ends = [], []
    for step in range(steps):
        if orders.random() < 0.2:
            gone = orders.randrange(4)
            moves.cancel(gone)
            under_way = {pair: has_ended for pair, has_ended in under_way.items() if pair[0] != gone}
        for _ in range(orders.randrange(3)):
            pair = orders.randrange(4), orders.randrange(40)
            if pair not in under_way:
                moves.begin(pair, is_save=bool(pair[1] % 2))
                under_way[pair] = False
        for pair in [pair for pair, has_ended in under_way.items() if not has_ended and own.random() < 0.5]:
            is_done = own.random() < 0.8
            moves.end(pair, is_done)
            under_way[pair] = True
            ends.append((pair, is_done))
        for move in moves.take_ended():
            assert under_way.pop(move.pair)
            assert move.was_done == next(done for pair, done in reversed(ends) if pair == move.pair)
            seen.append((step, move))
    return seen, ends


def test_all_ranks_see_the_same_ends_in_the_same_steps() -> None:
    """covers: C8 D9"""
    ranks = ThreadRanks(3)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda rank: history(AgreedMoves(ranks.of(rank)), rank), range(3)))
    alike = [[(step, move._replace(was_done=True)) for step, move in seen] for seen, _ in found]
    assert alike[0] == alike[1] == alike[2]
    assert len(alike[0]) > 20
    together = list(zip(*([move for _, move in seen] for seen, _ in found), strict=True))
    assert all(moves[0].is_done == all(move.was_done for move in moves) for moves in together)
    assert {move.is_done for move, *_ in together} == {False, True}
    assert any(move.was_done and not move.is_done for moves in together for move in moves)


def test_one_rank_waits_for_nobody() -> None:
    moves = AgreedMoves()
    assert moves.take_ended() == []
    moves.begin((1, 0), is_save=True)
    moves.begin((1, 1), is_save=False)
    moves.begin((2, 0), is_save=False)
    moves.end((1, 1), is_done=False)
    moves.end((2, 0), is_done=True)
    moves.cancel(2)
    assert moves.take_ended() == [EndedMove((1, 1), is_save=False, is_done=False, was_done=False)]
    moves.end((1, 0), is_done=True)
    assert moves.take_ended() == [EndedMove((1, 0), is_save=True, is_done=True, was_done=True)]
    assert moves.take_ended() == []
    with pytest.raises(KeyError):
        moves.end((1, 0), is_done=True)
