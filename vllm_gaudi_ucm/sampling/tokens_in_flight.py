"""Tokens that are sampled on the device, and on their way to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_ucm.sampling.host_copies import HostCopies
from vllm_gaudi_ucm.vllm_api.steps import LogprobsLists

if TYPE_CHECKING:
    from vllm_gaudi_ucm.batch.request_table import LiveRequest, RequestTable
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens


class SampledTokens(NamedTuple):
    """One list of token ids for each slot of the batch, and logprobs where a request asked for them."""

    tokens: list[list[int]]
    logprobs: LogprobsLists | None


@dataclass(frozen=True)
class DeviceTokens:
    """The samples of a step, on the device.

    tokens: [at least slots] of an integer type, one for each slot.
    tensors: tensors to copy to the host; reason: the reason under which these reads are counted.
    read: makes `SampledTokens` of the same tensors on the host.
    """

    tokens: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    reason: str
    read: Callable[..., SampledTokens]


class TokensInFlight:
    """The tokens of one step, until the host has them.

    The copies are queued behind the step, into pinned memory. Until then the request table has a stand-in for each.

    Args:
        sampled: result of a sampler; tokens that are on the host already are not in flight, and are in the table.
        carried: has them for the next step.
    """

    def __init__(
        self,
        sampled: DeviceTokens | SampledTokens,
        slots: list[LiveRequest],
        table: RequestTable,
        carried: CarriedTokens,
    ) -> None:
        self._table = table
        self._found: SampledTokens | None = None
        self._places: list[tuple[LiveRequest, int]] = []
        if isinstance(sampled, SampledTokens):
            self._found = sampled
            return
        carried.put(sampled.tokens[: len(slots)])
        self._copies = HostCopies(sampled.tensors)
        self._read = sampled.read
        self._places = [(request, table.append_unknown(request, slot)) for slot, request in enumerate(slots)]

    @property
    def are_waited_for(self) -> bool:
        """True if the host still has to read them and the wait has not been counted."""
        return self._found is None

    def wait(self) -> None:
        """Until the host has them, in any thread; the table learns nothing yet."""
        if self._found is None:
            self._copies.read()

    def look(self) -> SampledTokens:
        """Waits for the tokens, of which the table learns nothing yet: for checks."""
        return self._read(*self._copies.read()) if self._found is None else self._found

    def settle(self) -> tuple[SampledTokens, float]:
        """The tokens, which the request table has learned, and the seconds that the host has waited for them."""
        if self._found is not None:
            return self._found, 0.0
        began = time.perf_counter()
        copies = self._copies.read()
        waited = time.perf_counter() - began
        self._found = found = self._read(*copies)
        for (request, index), (token,) in zip(self._places, found.tokens, strict=True):
            self._table.learn(request, index, token)
        return found, waited
