"""Hidden states that a model passes to its draft head, in one tensor on the device (see `HiddenPlaces`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm_gaudi_ucm.batch.hidden_places import PASSED_STATES

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler

Combine = Callable[[torch.Tensor], torch.Tensor]


class PassedStates:
    """The table as the model sees it: each forward writes the states of its rows, and reads none.

    All shapes depend only on the number of rows, so a graph has one form.

    Args:
        values: the table, [places, width of the head].
        combine: makes a row's state, [rows, width of the head], of what the model passes on.
    """

    is_of_head = False

    def __init__(self, values: torch.Tensor, combine: Combine) -> None:
        self.values = values
        self._combine = combine
        self._write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = _write

    def give_to(self, model: nn.Module) -> None:
        """Makes a model use the table: `HiddenPlaces` and `Decoder` look for the attribute."""
        # not a module
        vars(model)[PASSED_STATES] = self

    def compile(self, compiler: StaticCompiler) -> None:
        """Makes the computations of a step compiled regions from now on."""
        self._combine, self._write = compiler.region(self._combine), compiler.region(self._write)

    def arguments(self, places: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the arguments of the model's forward that are made from the table. places: int64 [rows]."""
        return {}

    def keep(self, places: torch.Tensor, states: torch.Tensor) -> None:
        """Writes the states that a forward passes on. places: int64 [rows]; states: [rows, any width]."""
        self._write(self.values, places, self._combine(states))

    def refill(self) -> None:
        """Zeroes the table again, after a warm-up that computed nothing."""
        self.values.zero_()


class HeadStates(PassedStates):
    """The table as the draft head sees it: each forward reads the states of its rows, and writes its own behind them.

    It writes the places of the next positions, so it reads first.
    """

    is_of_head = True

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values, _unchanged)
        self._write = _write_behind
        self._read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _read

    def compile(self, compiler: StaticCompiler) -> None:
        super().compile(compiler)
        self._read = compiler.region(_read)

    def arguments(self, places: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden_states": self._read(self.values, places)}


def passed_states_of(model: object) -> PassedStates | None:
    """Returns the table that a model writes or reads; None if it neither has a draft head nor is one."""
    found: PassedStates | None = vars(model).get(PASSED_STATES) if isinstance(model, nn.Module) else None
    return found


def _unchanged(states: torch.Tensor) -> torch.Tensor:
    return states


def _read(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return values.index_select(0, places)


def _write(values: torch.Tensor, places: torch.Tensor, states: torch.Tensor) -> None:
    values.index_copy_(0, places, states.to(values.dtype))


def _write_behind(values: torch.Tensor, places: torch.Tensor, states: torch.Tensor) -> None:
    # pads stay at place 0: a Gaudi leaves open which value stays in a place that is written twice
    values.index_copy_(0, places + (places > 0).to(places.dtype), states.to(values.dtype))
