"""Work on a side stream runs before or after what other streams do, as a seed decides, until somebody waits for it."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.launch_queue import LaunchQueue, default_queue
from habana_frameworks.torch.simulator.poison import poison
from habana_frameworks.torch.simulator.tape import tensors_in

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

ORDER = 34


class Order:
    """Draws who is late. One per process, begun anew with every seed."""

    def __init__(self) -> None:
        self._seed: int | None = None

    def is_late(self) -> bool:
        if self._seed != card.stream_seed:
            self._seed, self._random = card.stream_seed, random.Random(card.stream_seed)
        return self._random.random() < 0.5


_order = Order()


def is_late(queue: LaunchQueue, func: OpOverload) -> bool:
    """Whether an operator that is launched on a stream now runs later than its caller thinks."""
    if queue is default_queue or not duties.on(ORDER) or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    # what is behind something late on its own stream is late, too
    return not queue.has_run(queue.launched) or _order.is_late()


def writes_first(func: OpOverload) -> bool:
    """Whether an operator writes into its first argument, which it returns."""
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def delay_write(queue: LaunchQueue, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator that writes: nothing is written before it runs."""
    card.late_works += 1
    queue.launch(lambda: _run(func, args, kwargs))
    return args[0]


def delay_results(
    queue: LaunchQueue, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
) -> None:
    """An operator whose results exist: they hold nothing before it runs, with what its inputs hold then."""
    outputs = tensors_in(results)
    given = {tensor.untyped_storage()._cdata for tensor in (*tensors_in(args), *tensors_in(kwargs))}
    if any(tensor.untyped_storage()._cdata in given for tensor in outputs):
        return
    card.late_works += 1
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        for tensor in outputs:
            poison(tensor)

    def run() -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for target, found in zip(outputs, tensors_in(func(*args, **kwargs)), strict=True):
                target.copy_(found)

    queue.launch(run)


def _run(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        func(*args, **kwargs)
