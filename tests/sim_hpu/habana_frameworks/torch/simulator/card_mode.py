"""What the card itself does to operators and copies, around what is checked and counted of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from habana_frameworks.torch.internal.bridge_config import compile_only
from habana_frameworks.torch.simulator import collectives, late_copies, side_streams
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.garbage import garbage
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.number_formats import FORMATS, saturated
from habana_frameworks.torch.simulator.operator_mode import OperatorMode
from habana_frameworks.torch.simulator.rules import check_operator, has_dynamic_shape, named_arguments, reads_host
from habana_frameworks.torch.simulator.state import state
from habana_frameworks.torch.simulator.tape import tensors_in

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

Args = Sequence[Any]
Kwargs = Mapping[str, Any]

_COPY, _CAST = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


class CardOperatorMode(OperatorMode):
    """One per thread, always entered."""

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace in collectives.NAMESPACES:
            with torch._C.DisableTorchFunction():
                call = collectives.prepare(func, args, kwargs)
            result = super().__torch_dispatch__(func, types, call.args, kwargs)
            with torch._C.DisableTorchFunction():
                return call.finish(result)
        if func is _COPY or func is _CAST:
            return self._copy(func, types, args, kwargs)
        if _is_launched_now() and side_streams.is_late(state.queue, func) and _computes_on_card(func, args, kwargs):
            return self._late(func, types, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy(self, func: OpOverload, types: Any, args: Args, kwargs: dict[str, Any]) -> Any:
        target = args[0]
        if func is _COPY and _arrives_late(target, args, kwargs):
            state.catch_up()
            late_copies.delay(state.queue, args[1], target)
            return target
        if func is _COPY and _leaves_late(target, args, kwargs):
            state.cut()
            garbage.check_read(func.__name__, args[1])
            late_copies.deliver(state.queue, args[1], target)
            return target
        result = super().__torch_dispatch__(func, types, args, kwargs)
        source = args[1] if func is _COPY else target
        if result.dtype in _EIGHT_BITS and source.dtype not in _EIGHT_BITS and duties.on(FORMATS):
            _saturate(result, source)
        return result

    def _late(self, func: OpOverload, types: Any, args: Args, kwargs: dict[str, Any]) -> Any:
        queue = state.queue
        if side_streams.writes_first(func):
            with torch._C.DisableTorchFunction():
                check_operator(func, named_arguments(func, args, kwargs))
                state.stream.add(func, args, kwargs)
            state.operator_ran()
            return side_streams.delay_write(queue, func, args, kwargs)
        results = super().__torch_dispatch__(func, types, args, kwargs)
        side_streams.delay_results(queue, func, args, kwargs, results)
        return results


def _is_launched_now() -> bool:
    """Not in a region, and not of work that runs now."""
    return state.region is None and state.making != "host"


def _computes_on_card(func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    """An operator of tensors of the card alone, whose result has a known shape and stays there."""
    tensors = tensors_in(args) + tensors_in(kwargs)
    if not tensors or reads_host(func) or has_dynamic_shape(func, named_arguments(func, args, kwargs)) is not None:
        return False
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors) and all(
        memory.serial(tensor) is not None for tensor in tensors
    )


def _arrives_late(target: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """A copy from the host."""
    if not _may_be_late(target, args, kwargs) or memory.serial(target) is None or memory.serial(args[1]) is not None:
        return False
    return late_copies.is_late(args[1], target, non_blocking=True)


def _leaves_late(target: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """A copy to the host."""
    if not _may_be_late(target, args, kwargs) or memory.serial(target) is not None or memory.serial(args[1]) is None:
        return False
    return late_copies.is_late_to_host(args[1], target, non_blocking=True)


def _may_be_late(target: Tensor, args: Args, kwargs: Kwargs) -> bool:
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    return non_blocking and not isinstance(target, FakeTensor) and state.region is None


def _saturate(result: Tensor, source: Tensor) -> None:
    """Casts to 8 bits end at the end of the range."""
    if isinstance(result, FakeTensor) or memory.serial(result) is None or compile_only():
        return
    with torch._C.DisableTorchFunction():
        result.copy_(saturated(source, result.dtype).expand_as(result))
