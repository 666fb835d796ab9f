"""The maximum of the values of each row: the only reduction by index that Gaudi has."""

import warnings

from torch import Tensor

# torch says so once in every process, to a user who cannot choose another operation; tests hold what it computes.
warnings.filterwarnings("ignore", message=r"index_reduce\(\) is in beta", category=UserWarning)


def index_maximum_(into: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Sets row `rows[i]` of `into` to its maximum with `values[i]`, per element, in place. rows: int64 [values]."""
    return into.index_reduce_(0, rows, values, "amax", include_self=True)


def index_maximum(start: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """The same into a new tensor that begins as `start`."""
    return start.index_reduce(0, rows, values, "amax", include_self=True)
