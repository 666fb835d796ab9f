"""Slots by a cumulative sum, in plain torch on any device; reads nothing on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.mem_state.slots import DUMMY_SLOT


def take(state: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """See `take_slots`."""
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
    # the lowest places of those taken, then pads
    found = torch.topk(torch.where(taken, places, len(state)), most, largest=False, sorted=True).values
    return torch.where(found < len(state), found, DUMMY_SLOT), state & ~taken


def give(state: Tensor, slots: Tensor) -> Tensor:
    """See `give_slots`."""
    return state.index_fill(0, slots, True) & (torch.arange(len(state), device=state.device) != DUMMY_SLOT)
