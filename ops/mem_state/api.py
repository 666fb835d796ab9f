"""The state of a pool of slots on the device: `take_slots` and `give_slots`, at static shapes, without a host read.

Nothing of the plugin uses it: its scheduler is on the host, where an allocator of runs is faster
(docs/guides/token-granularity.md). It is for a program that allots slots inside of a captured graph.

Source: TokenAttention of LightLLM, whose `mem_state` is this one; there the results have the length of the request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_gaudi_ucm.ops.mem_state.impl import reference
from vllm_gaudi_ucm.ops.mem_state.slots import DUMMY_SLOT


def new_state(num_slots: int, device: torch.device) -> Tensor:
    """bool [num_slots]: all free but the dummy slot 0, which pads point at."""
    state = torch.ones(num_slots, dtype=torch.bool, device=device)
    state[DUMMY_SLOT] = False
    return state


def take_slots(state: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Takes `count` free slots: the first run of so many, or where there is none the first free ones.

    state: bool [slots], True where a slot is free. count: int64 [], from 0 to `most`, on the device.
    most: shape of the result, at most the number of slots.
    Returns (int64 [most], ascending and then pads, which are the dummy slot 0; the state after it). Where fewer than
    `count` are free nothing is taken, and all are pads.
    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check_state("take_slots", state)
        if count.dtype != torch.int64 or count.dim() or count.device != state.device:
            raise ValueError(f"take_slots: count is {_kind(count)}, expected torch.int64 () on {state.device}")
        if not 0 < most <= len(state):
            raise ValueError(f"take_slots: most is {most}, expected 1 to the number of slots, {len(state)}")
    return reference.take(state, count, most)


def give_slots(state: Tensor, slots: Tensor) -> Tensor:
    """The state after slots were given back. slots: int64 [n]; pads, which are the dummy slot 0, may repeat.

    Raises ValueError for shapes, dtypes or devices that do not fit together (not while compiling).
    """
    if not torch.compiler.is_compiling():
        _check_state("give_slots", state)
        if slots.dtype != torch.int64 or slots.dim() != 1 or slots.device != state.device:
            raise ValueError(f"give_slots: slots are {_kind(slots)}, expected torch.int64 [n] on {state.device}")
    return reference.give(state, slots)


def _check_state(operation: str, state: Tensor) -> None:
    if state.dtype != torch.bool or state.dim() != 1 or not len(state):
        raise ValueError(f"{operation}: state is {_kind(state)}, expected torch.bool [slots]")


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
