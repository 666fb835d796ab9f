"""Chooses the graphs to execute after a warm-up that only compiled: the smallest and the largest of each phase."""

from collections.abc import Iterable
from itertools import product

from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.warm_up.records import GraphKey


def extremes(keys: Iterable[GraphKey]) -> list[GraphKey]:
    """Returns the smallest and the largest graph of each phase, of prompt remainders and of logits, in the order of
    `keys`.

    Problems that only execution finds (an operator that fails, a workspace that does not fit) show at one end or the
        other.
    """
    kinds: dict[object, list[GraphKey]] = {}
    ordered = list(keys)
    for key in ordered:
        kinds.setdefault(_kind(key), []).append(key)
    chosen = {end for members in kinds.values() for end in (min(members, key=_size), max(members, key=_size))}
    return [key for key in ordered if key in chosen]


def _kind(key: GraphKey) -> object:
    if isinstance(key, RemainderShape):
        return RemainderShape
    return key.phase if isinstance(key, ForwardShape) else int


def _size(key: GraphKey) -> tuple[int, ...]:
    shape = key.forward if isinstance(key, RemainderShape) else key
    return (shape,) if isinstance(shape, int) else shape[1:]


def largest_of_phases(limits: Limits) -> list[ForwardShape]:
    """Returns the largest shape of each phase. Without shared or chosen blocks, several phases coincide."""
    phases = (phase for phase in product((False, True), repeat=4) if any(phase[:3]))
    return list(dict.fromkeys(limits.phase_maximum(*phase) for phase in phases))
