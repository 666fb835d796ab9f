"""Device "hpu" in Python calls: tensors asked for on it are made on the CPU and remembered as the card's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.placement import CARD, HOST, is_on_card, move, place_of
from habana_frameworks.torch.simulator.state import Place, state

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device

# Made of values that the host has: these are copied to the card, where other factories compute on it.
_OF_HOST_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.scalar_tensor})
_CONSTRUCTORS = frozenset(default_device._device_constructors())

Args = Sequence[Any]
Kwargs = dict[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]


class DeviceMode(TorchFunctionMode):
    """One per thread, always entered."""

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.compiler.is_compiling():
            # dynamo cannot trace the super() call in this Python method, which it never enters without a mode
            func = torch.unflatten if func is torch.Tensor.unflatten else func
            return func(*_on_host(args), **dict(zip(kwargs, _on_host(kwargs.values()), strict=True)))
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if kwargs.get("device") is None and func in _CONSTRUCTORS and default_device.CURRENT_DEVICE is not None:
            kwargs["device"] = default_device.CURRENT_DEVICE
        kwargs.pop("pin_memory", None)  # there is no driver that could pin
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        return _make(func, args, kwargs, place_of(kwargs.pop("device")))


def _on_host(values: Any) -> list[Any]:
    """While torch.compile traces, all tensors are on the CPU."""
    return [HOST if _names_hpu(value) else value for value in values]


def _names_hpu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "hpu") or (
        isinstance(value, str) and (value == "hpu" or value.startswith("hpu:"))
    )


def _make(func: Any, args: Args, kwargs: Kwargs, place: Place | None) -> Any:
    """A factory with a device."""
    if place is None:
        return func(*args, **kwargs)
    kwargs["device"] = HOST
    if func in _OF_HOST_DATA:
        source = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        with state.make("host"):
            made = func(*args, **kwargs)
        return move(made, place, func, from_card=is_on_card(source))
    with state.make(place):
        return func(*args, **kwargs)


def _to(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`Tensor.to` in all its forms: within a place as torch does it, between the places a copy."""
    target = _target(args[1:], kwargs)
    tensor = args[0]
    here: Place = "card" if is_on_card(tensor) else "host"
    args = [HOST if _names_device(value) else value for value in args]
    if kwargs.get("device") is not None and target is not None:
        kwargs["device"] = HOST
    if target is None or target == here:
        return func(*args, **kwargs)
    if here == "card":
        state.catch_up()
    with state.make("host"):
        converted = func(*args, **kwargs)
    return move(converted, target, func, from_card=here == "card")


def _target(args: Args, kwargs: Kwargs) -> Place | None:
    for value in (*args, *kwargs.values()):
        if _names_device(value):
            return place_of(value)
        if isinstance(value, torch.Tensor):
            return "card" if is_on_card(value) else "host"
    return None


def _names_device(value: Any) -> bool:
    """A device that one of the two places answers to."""
    is_device = isinstance(value, torch.device | str) or (isinstance(value, int) and not isinstance(value, bool))
    return is_device and place_of(value) is not None


def _cpu(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _to(torch.Tensor.to, [args[0], HOST], {})


def _device(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return CARD if is_on_card(args[0]) else func(*args)


def _is_cpu(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return not is_on_card(args[0]) and func(*args)


def _get_device(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return CARD.index if is_on_card(args[0]) else func(*args, **kwargs)


def _read(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Reads that pass by the operators."""
    if not is_on_card(args[0]):
        return func(*args, **kwargs)
    copy = move(args[0], "host", func, from_card=True)
    return func(copy, *args[1:], **kwargs)


def _refuse_numpy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    if is_on_card(args[0]):
        raise HpuConstraintError(
            func.__name__, "the tensor is on the card, numpy reads the host's memory; copy it first"
        )
    return func(*args, **kwargs)


def _deepcopy(func: Any, args: Args, kwargs: Kwargs) -> Any:
    copy = func(*args, **kwargs)
    if is_on_card(args[0]):
        memory.put(copy)
    return copy


def _pin_memory(func: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[0]


_HANDLERS: dict[Any, Handler] = {
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.device.__get__: _device,
    torch.Tensor.is_cpu.__get__: _is_cpu,
    torch.Tensor.get_device: _get_device,
    torch.Tensor.tolist: _read,
    torch.Tensor.__repr__: _read,
    torch.Tensor.__format__: _read,
    torch.Tensor.__reduce_ex__: _read,
    torch.Tensor.numpy: _refuse_numpy,
    torch.Tensor.__array__: _refuse_numpy,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.pin_memory: _pin_memory,
}
