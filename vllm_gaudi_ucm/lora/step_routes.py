"""The adapters of the rows of a step, as layers read them: of all rows, then of those that yield logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_gaudi_ucm.ops.lora.api import Routes, route_rows
from vllm_gaudi_ucm.ops.lora.weights import NO_ADAPTER
from vllm_gaudi_ucm.ops.registry import AUTO

if TYPE_CHECKING:
    from vllm_gaudi_ucm.graphs.runners.compiled import StaticCompiler

STACKED = "stacked"
"""The implementation of compiled regions, on every device."""


class StepRoutes:
    """The routes that layers read while the model computes. All are made on the device: a captured graph makes them of
    the step's tensor when it is replayed, and has one form whichever adapters a step has.

    Args:
        slots: adapters that the layers hold.
        rank: rank of each slot.
        num_rows: rows of the largest step.
        device: device of the model.
        captured: forwards are captured at static shapes.
        regions: classes of modules with adapters outside of a model's layers, which are compiled as regions.

    current: routes of the rows that layers compute.
    """

    def __init__(
        self,
        slots: int,
        rank: int,
        num_rows: int,
        device: torch.device,
        *,
        captured: bool,
        regions: tuple[type[nn.Module], ...] = (),
    ) -> None:
        self.slots, self.rank, self.regions = slots, rank, regions
        self._captured = captured
        self._implementation = AUTO
        self._make: Callable[[torch.Tensor], Routes] = self._route
        # hidden states outlive a forward, and logits of any of them may be asked for
        self._of_hidden = torch.full((num_rows,), NO_ADAPTER, dtype=torch.int64, device=device)
        self.current = self._route(self._of_hidden[:1])

    @property
    def begins(self) -> bool:
        """Returns whether layers may start products before their own one: in graphs alone, whose branches run side by
        side. Else the host would take longer.
        """
        return self._captured and self.current.implementation.begins

    def compile(self, compiler: StaticCompiler) -> None:
        """Makes routes in a compiled region of their own from now on; regions of layers get them as inputs."""
        self._implementation = STACKED
        self._make = self._compiled(compiler)

    def begin(self, rows: torch.Tensor) -> None:
        """Begins a forward. rows: int64 [rows], the slot of each."""
        self._of_hidden[: len(rows)].copy_(rows)
        self.current = self._make(rows)

    def of_hidden(self, count: int, rows: torch.Tensor | None) -> None:
        """Begins the logits of some rows of the last forward, or of the first `count` if rows is None."""
        chosen = self._of_hidden[:count] if rows is None else self._of_hidden.index_select(0, rows)
        self.current = self._make(chosen)

    def _route(self, rows: torch.Tensor) -> Routes:
        return route_rows(rows, self.slots, self.rank, implementation=self._implementation, captured=self._captured)

    def _compiled(self, compiler: StaticCompiler) -> Callable[[torch.Tensor], Routes]:
        implementation = self._route(self._of_hidden[:1]).implementation
        slots, rank = self.slots, self.rank

        def form(rows: torch.Tensor) -> Any:
            return implementation.route(rows, slots, rank)

        region = compiler.region(form)
        return lambda rows: Routes(implementation, rows, region(rows))
