"""The largest of the values of each row: of the reductions by index this is the one that Gaudi has."""

from __future__ import annotations

import warnings

from torch import Tensor

# torch says so once in every process, to a user who cannot choose another operation; tests hold what it computes.
warnings.filterwarnings("ignore", message=r"index_reduce\(\) is in beta", category=UserWarning)


def index_maximum_(into: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Raises row `rows[i]` of `into` to `values[i]`, element by element, in place. rows: int64 [values]."""
    return into.index_reduce_(0, rows, values, "amax", include_self=True)
