"""How Dynamo passes calls of operators through the stand-in's device mode: those that it does not change, as they are;
`unflatten`, a method in Python, as its operator.

A Gaudi has no such mode. Dynamo would trace its method for each call of an operator, a third of what tracing takes.
"""

from collections.abc import Iterable, Sequence
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
        passed = _passed(fn, args)
        if passed is not None:
            return passed.call_function(tx, args, kwargs)
    return _trace_method(self, tx, fn, types, args, kwargs)


def _is_on_host(device: Any) -> bool:
    """Whether a call without this argument, or with it, names no device of the card."""
    return device is None or (device.is_python_constant() and device.as_python_constant() in (None, HOST))


def _passed(fn: Any, args: Sequence[Any]) -> Any:
    """What is called in place of a function, often itself; None where the mode's method is to be traced."""
    try:
        function = fn.as_python_constant()
    except NotImplementedError:
        return None
    if function is torch.Tensor.unflatten:
        # dynamo cannot trace the super() call in this Python method, which it never enters without a mode
        return TorchInGraphFunctionVariable(torch.unflatten)
    if function is torch.Tensor.to:
        targets = [arg.as_python_constant() if arg.is_python_constant() else None for arg in args[1:]]
        return fn if all(isinstance(target, torch.dtype) for target in targets) else None
    return None if function in CHANGED_WHEN_TRACED else fn
