"""Copies that several workers make, each of its part of a block. They end in the same step, alike, on all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_ucm.distributed.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from vllm_gaudi_ucm.memory_mode.copies import Pair

# the outcome of a move is the smallest value of all ranks
_UNDER_WAY, _FAILED, _DONE = range(3)


class EndedMove(NamedTuple):
    """A move that all ranks ended. is_save: off the device. is_done: succeeded on all. was_done: on this one."""

    pair: Pair
    is_save: bool
    is_done: bool
    was_done: bool


class AgreedMoves:
    """Follows the moves that the scheduler has ordered, which every rank begins and cancels in the same steps.

    A rank that has made its copy waits for the others; one that could not fails it for all. A block has one move at a
    time. With one rank nothing waits.

    Args:
        ranks: all that have a part of each block.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        # in the order of the orders, which is the same on all ranks: (is_save, its state here)
        self._moves: dict[Pair, tuple[bool, int]] = {}

    def begin(self, pair: Pair, is_save: bool) -> None:
        """A move was ordered."""
        assert pair not in self._moves, f"block {pair} is moved already"
        self._moves[pair] = is_save, _UNDER_WAY

    def end(self, pair: Pair, is_done: bool) -> None:
        """Notes that a move has ended on this rank."""
        is_save, _ = self._moves[pair]
        self._moves[pair] = is_save, _DONE if is_done else _FAILED

    def cancel(self, generation: int) -> None:
        """Its moves are of no interest any more."""
        self._moves = {pair: move for pair, move in self._moves.items() if pair[0] != generation}

    def take_ended(self) -> list[EndedMove]:
        """Returns the moves that have ended on all ranks, once each, in the same order everywhere.

        All ranks must call it in the same steps. While moves are in progress, it is a collective on the host.
        """
        if not self._moves:
            return []
        agreed = self._ranks.least_of([state for _, state in self._moves.values()])
        found = zip(list(self._moves.items()), agreed, strict=True)
        ended = [
            EndedMove(pair, is_save, state == _DONE, own == _DONE)
            for (pair, (is_save, own)), state in found
            if state != _UNDER_WAY
        ]
        for move in ended:
            del self._moves[move.pair]
        return ended
