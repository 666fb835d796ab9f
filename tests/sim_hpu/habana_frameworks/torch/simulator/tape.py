"""A captured graph: the operators that ran, to be run again on other contents. No Python of the model runs again.

Tensors are kept as places in storages, as on the card: a view is no operator, a write is seen through every view.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.rules import check_operator, named_arguments

import torch
from torch._ops import OpOverload

Storages = dict[int, torch.UntypedStorage]


@dataclass(frozen=True)
class Place:
    """A tensor of the card: where it is in which storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self, storages: Storages) -> torch.Tensor:
        found = torch.empty(0, dtype=self.dtype)
        return found.set_(storages[self.storage], self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Step:
    """One operator. results: numbers of the storages it makes, by the place of the tensor among its outputs."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, int], ...]


class Tape:
    """Operators of one captured region, with the storages from outside that they use (weights, KV cache, inputs)."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._outside: Storages = {}
        self._made: set[int] = set()
        self._done_with: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments as they are before the operator runs, with places for tensors."""
        return tuple(map(self._place, args)), {key: self._place(value) for key, value in kwargs.items()}

    def add(self, func: OpOverload, encoded: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        """Records an operator that ran. outputs: its tensors, in order."""
        results = []
        for index, tensor in enumerate(outputs):
            serial = memory.serial(tensor)
            if serial is not None and serial not in self._made and serial not in self._outside:
                self._made.add(serial)
                results.append((index, serial))
        self._steps.append(Step(func, *encoded, tuple(results)))

    def finish(self, outputs: Sequence[torch.Tensor]) -> list[Place]:
        """Ends the recording: places of the region's outputs. Storages are dropped after their last use in a replay."""
        places = [self._place(tensor) for tensor in outputs]
        keep = {place.storage for place in places}
        last: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            used = [place.storage for place in _places(step.args)] + [place.storage for place in _places(step.kwargs)]
            last.update(dict.fromkeys([*used, *(serial for _, serial in step.results)], index))
        for serial, index in last.items():
            if serial in self._made and serial not in keep:
                self._done_with.setdefault(index, []).append(serial)
        return places

    def replay(self, inputs: Storages) -> Storages:
        """Runs the operators again; `inputs` stand in for storages of the capture. Returns the storages at the end.

        Indices are checked again: on the card a replay with a bad one would read or write somewhere.
        """
        storages = {**self._outside, **inputs}
        for index, step in enumerate(self._steps):
            args, kwargs = _decode(step.args, storages), _decode(step.kwargs, storages)
            check_operator(step.func, named_arguments(step.func, args, kwargs))
            outputs = step.func(*args, **kwargs)
            tensors = tensors_in(outputs)
            for place, serial in step.results:
                storages[serial] = tensors[place].untyped_storage()
            for serial in self._done_with.get(index, ()):
                del storages[serial]
        return storages

    def forget(self, serials: Sequence[int]) -> None:
        """Does not keep these storages alive: every replay brings its own (`disable_tensor_cache`)."""
        for serial in serials:
            self._outside.pop(serial, None)

    def _place(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            serial = memory.serial(value)
            if serial is None:
                return value.clone()  # a number of the host: its value now is part of the graph
            if serial not in self._made:
                self._outside.setdefault(serial, value.untyped_storage())
            return Place(serial, value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
        if isinstance(value, list | tuple):
            return type(value)(map(self._place, value))
        return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def _places(value: Any) -> list[Place]:
    if isinstance(value, Place):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [place for item in value for place in _places(item)]


def _decode(value: Any, storages: Storages) -> Any:
    if isinstance(value, Place):
        return value.tensor(storages)
    if isinstance(value, dict):
        return {key: _decode(item, storages) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_decode(item, storages) for item in value)
    return value
