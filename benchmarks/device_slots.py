"""A pool of slots on a device, at static shapes and without a host read: what `benchmarks.mem_state` compares.

Source: TokenAttention of LightLLM, whose `mem_state` this is; there the results have the length of the request.
"""

from __future__ import annotations

import torch
from torch import Tensor

DUMMY_SLOT = 0
"""The slot that is never free; pads point at it."""


def new_state(num_slots: int, device: torch.device) -> Tensor:
    """bool [num_slots]: all free but the dummy slot 0, which pads point at."""
    state = torch.ones(num_slots, dtype=torch.bool, device=device)
    state[DUMMY_SLOT] = False
    return state


def take_slots(state: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Takes `count` free slots: the first run of this many, or if there is none the first free ones.

    state: bool [slots], True where a slot is free. count: int64 [], from 0 to `most`, on the device.
    most: shape of the result, at most the number of slots.
    Returns (int64 [most], ascending and then pads, which are the dummy slot 0; the state after it). If fewer than
    `count` are free, no slot is taken and all are pads.
    Raises ValueError if shapes, dtypes or devices do not match (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check_state("take_slots", state)
        if count.dtype != torch.int64 or count.dim() or count.device != state.device:
            raise ValueError(f"take_slots: count is {_kind(count)}, expected torch.int64 () on {state.device}")
        if not 0 < most <= len(state):
            raise ValueError(f"take_slots: most is {most}, expected 1 to the number of slots, {len(state)}")
    return _taken(state, count, most)


def give_slots(state: Tensor, slots: Tensor) -> Tensor:
    """The state after slots were given back. slots: int64 [n]; pads, which are the dummy slot 0, may repeat.

    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check_state("give_slots", state)
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.device != state.device:
            raise ValueError(f"give_slots: slots are {_kind(slots)}, expected torch.int64 [n] on {state.device}")
    return state.index_fill(0, slots, True) & (torch.arange(len(state), device=state.device) != DUMMY_SLOT)


def _check_state(operation: str, state: Tensor) -> None:
    if state.dtype != torch.bool or state.dim() != 1 or not len(state):
        raise ValueError(f"{operation}: state is {_kind(state)}, expected torch.bool [slots]")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _taken(state: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Finds slots by a cumulative sum; reads nothing on the host."""
    places = torch.arange(len(state), device=state.device)
    before = torch.cumsum(state, 0) - state.long()
    # free slots from here to `count` places on
    ends = torch.minimum(places + count, torch.full_like(places, len(state)))
    until = torch.cat([before, before[-1:] + state[-1:].long()]).index_select(0, ends)
    begins_run = (until - before == count) & (places + count <= len(state))
    first = torch.where(begins_run, places, len(state)).amin()
    in_run = (places >= first) & (places < first + count)
    scattered = state & (before < count)
    enough = before[-1] + state[-1].long() >= count
    taken = torch.where(first < len(state), in_run, scattered) & enough & (count > 0)
    # the lowest places of the taken ones, then pads
    found = torch.topk(torch.where(taken, places, len(state)), most, largest=False, sorted=True).values
    return torch.where(found < len(state), found, DUMMY_SLOT), state & ~taken
