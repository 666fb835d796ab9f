"""A kernel of the card: what the bridge calls it, what it computes, since when it exists."""

from collections.abc import Callable
from typing import Any, NamedTuple

from habana_frameworks.torch.simulator.duties import duties

from torch import Tensor


class Kernel(NamedTuple):
    """schema: of the operator, without its namespace. run: computes it, and checks its arguments.

    shape: makes results of its shapes and dtypes while torch.compile traces, None where `run` itself does.
    since: the oldest build of Gaudi's software that has it.
    """

    schema: str
    run: Callable[..., Any]
    shape: Callable[..., Any] | None = None
    since: str = "1.19.0.0"

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def same_dtype(duty: int, operator: str, expected: Tensor, **others: Tensor) -> None:
    """Refuses tensors of another dtype than the first: the graph compiler fails on a mix."""
    for name, tensor in others.items():
        if tensor.dtype != expected.dtype:
            duties.refuse(
                duty, operator, f"{name} is {tensor.dtype}, the input {expected.dtype}", "cast it to the input's dtype"
            )
