"""A request's lock: unlocked, locked, or at a checkpoint. Source: seed 002 (KVStar), 2.2 and 5.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.protocol.sparse_meta import SelectionMode

if TYPE_CHECKING:
    from vllm_gaudi_ucm.protocol.sparse_meta import RequestSelection


@dataclass
class KVStarState:
    """State of one request.

    request_id: opaque.
    checkpoint_interval, lock_duration: in steps of the request, whatever the number of its layers or tokens.
    is_locked: whether a selection is locked.
    locked_selection: logical blocks of a selection that the host knows; None while it lies on the device alone.
    lock_position: tokens of the request when it was locked.
    steps_since_lock, steps_since_checkpoint: steps that the locked selection has served.
    window: sinks, window and number of blocks at the lock or the last checkpoint; they stay until the next one, so
        that every token newer than the selection is attended.
    position: the last position that `get_selection` was asked for.
    """

    request_id: str
    checkpoint_interval: int = 8
    lock_duration: int = 16
    is_locked: bool = False
    locked_selection: list[int] | None = None
    lock_position: int = 0
    steps_since_lock: int = 0
    steps_since_checkpoint: int = 0
    window: RequestSelection | None = None
    position: int | None = None

    def lock(self, position: int, selection: list[int] | None = None) -> None:
        """Locks from this step on."""
        self.is_locked = True
        self.locked_selection = None if selection is None else list(selection)
        self.lock_position = self.position = position
        self.steps_since_lock = self.steps_since_checkpoint = 0
        self.window = None

    def unlock(self) -> None:
        self.is_locked = False
        self.locked_selection = self.window = None

    def next_step(self) -> SelectionMode:
        """What the request's next step does; SELECT: there is no lock, or it has served its time."""
        if not self.is_locked:
            return SelectionMode.SELECT
        self.steps_since_lock += 1
        self.steps_since_checkpoint += 1
        if self.steps_since_lock >= self.lock_duration:
            return SelectionMode.SELECT
        if self.steps_since_checkpoint >= self.checkpoint_interval:
            self.steps_since_checkpoint = 0
            return SelectionMode.CHECK
        return SelectionMode.REUSE
