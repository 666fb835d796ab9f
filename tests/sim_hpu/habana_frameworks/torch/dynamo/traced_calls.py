"""How Dynamo passes calls of operators through the stand-in's device mode: those that it does not change, as they are;
`unflatten`, a method in Python, as its operator.

A Gaudi has no such mode. Dynamo would trace its method for each call of an operator, a third of what tracing takes.
"""

from collections.abc import Iterable
from typing import Any

from habana_frameworks.torch.simulator.device_mode import CHANGED_WHEN_TRACED, DeviceMode
from habana_frameworks.torch.simulator.placement import HOST

import torch
from torch._dynamo.variables import TorchInGraphFunctionVariable
from torch._dynamo.variables.torch_function import TorchFunctionModeVariable

_trace_method = TorchFunctionModeVariable.call_torch_function


def pass_unchanged_calls() -> None:
    """From now on; torch.compile traces the others as before."""
    TorchFunctionModeVariable.call_torch_function = _call_torch_function  # type: ignore[method-assign]


def _call_torch_function(self: Any, tx: Any, fn: Any, types: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    args = list(args)
    if isinstance(self.value, DeviceMode) and _is_on_host(kwargs.get("device")):
        if _is_unchanged(fn, args):
            return fn.call_function(tx, args, kwargs)
        if _is(fn, torch.Tensor.unflatten):
            return TorchInGraphFunctionVariable(torch.unflatten).call_function(tx, args, kwargs)
    return _trace_method(self, tx, fn, types, args, kwargs)


def _is_on_host(device: Any) -> bool:
    """Whether a call without this argument, or with it, names no device of the card."""
    return device is None or (device.is_python_constant() and device.as_python_constant() in (None, HOST))


def _is(fn: Any, function: Any) -> bool:
    return fn.is_python_constant() and fn.as_python_constant() is function


def _is_unchanged(fn: Any, args: Iterable[Any]) -> bool:
    try:
        function = fn.as_python_constant()
    except NotImplementedError:
        return False
    if function is torch.Tensor.to:
        return all(
            arg.is_python_constant() and isinstance(arg.as_python_constant(), torch.dtype) for arg in [*args][1:]
        )
    return function not in CHANGED_WHEN_TRACED
