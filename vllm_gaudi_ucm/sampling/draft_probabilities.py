"""The distributions that drafts were drawn from, kept on the device until the drafts are verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

_ATTRIBUTE = "draft_probabilities"


class ProposedRows(NamedTuple):
    """The drafts that the tokens of the sampler's slots are compared with.

    tokens: int64 [slots]; -1 for a slot without a draft, or with one whose distribution is not known. places: int64
    [slots], of their distributions in `probabilities`. probabilities: float32 [places, vocabulary].
    """

    tokens: NDArray[np.int64]
    places: NDArray[np.int64]
    probabilities: torch.Tensor


class VerifiedSlots:
    """Holds the drafts that the sampler's next tokens verify.

    rows: None if these are drawn without drafts.
    """

    def __init__(self) -> None:
        self.rows: ProposedRows | None = None

    @contextmanager
    def of(self, rows: ProposedRows | None) -> Iterator[None]:
        """Inside of it, tokens that are drawn verify these drafts."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None


class DraftProbabilities:
    """Distributions of the drafts that the last step proposed, in a tensor on the device.

    A draft whose distribution is no longer known, because its request was not in the last step, is accepted if the
    sampled token equals it: this is exact for any draft, however it was made.

    Args:
        max_num_seqs: requests of the largest step.
        num_drafts: of each.

    values: float32 [places, vocabulary]. Pads write place 0, which is never read.
    """

    def __init__(self, max_num_seqs: int, num_drafts: int, vocabulary: int, device: torch.device) -> None:
        self.values = torch.zeros(1 + max_num_seqs * num_drafts, vocabulary, dtype=torch.float32, device=device)
        self._num_drafts = num_drafts
        self._first: dict[str, int] = {}

    def give_to(self, draft_model: nn.Module) -> None:
        """Keeps the table at the draft model, with which it is loaded and removed."""
        # not a module
        vars(draft_model)[_ATTRIBUTE] = self

    def begin(self, request_ids: Sequence[str]) -> None:
        """Gives these requests new places, and forgets all others."""
        self._first = {request_id: 1 + index * self._num_drafts for index, request_id in enumerate(request_ids)}

    def place(self, request_id: str, draft: int) -> int:
        """Returns the place of a request's draft, counted from 0; 0 if the request has none."""
        first = self._first.get(request_id)
        return 0 if first is None else first + draft

    def proposed(
        self, request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]], position: int
    ) -> ProposedRows | None:
        """Returns the drafts that the tokens of a position are compared with; None if all are compared for equality.

        request_ids: of the sampler's slots. drafts: of the step.
        """
        places = np.zeros(len(request_ids), np.int64)
        tokens = np.full(len(request_ids), -1, np.int64)
        for slot, request_id in enumerate(request_ids):
            some = drafts.get(request_id, ())
            if position < len(some) and request_id in self._first:
                places[slot], tokens[slot] = self._first[request_id] + position, some[position]
        return ProposedRows(tokens, places, self.values) if places.any() else None

    def refill(self) -> None:
        """Zeroes the table again, after a warm-up that computed nothing."""
        self.values.zero_()


def draft_probabilities_of(draft_model: object) -> DraftProbabilities | None:
    """Returns the table that was given to a draft model; None if it proposes likeliest tokens, or there is none."""
    found: DraftProbabilities | None = None if draft_model is None else vars(draft_model).get(_ATTRIBUTE)
    return found
