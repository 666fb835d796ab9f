"""Device "hpu" in Python calls: tensors asked for on it are made on the CPU and remembered as the card's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from habana_frameworks.torch.simulator import late_copies
from habana_frameworks.torch.simulator.constraint import HpuConstraintError
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.garbage import garbage
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.placement import CARD, HOST, is_on_card, move, place_of
from habana_frameworks.torch.simulator.state import Place, state

import torch
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device

# Made of values that the host has: these are copied to the card, where other factories compute on it.
_OF_HOST_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, torch.scalar_tensor})
# What may read the host, or names a device by its place. So do calls with a device.
CHANGED_WHEN_TRACED = (torch.Tensor.to, torch.Tensor.cpu, one_hot)
_CONSTRUCTORS = frozenset(default_device._device_constructors())

Args = Sequence[Any]
Kwargs = dict[str, Any]
Handler = Callable[[Any, Args, Kwargs], Any]


class DeviceMode(TorchFunctionMode):
    """One per thread, always entered."""

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            # dynamo traces this method where a call is not passed by, see `dynamo.traced_calls`
            if func in CHANGED_WHEN_TRACED:
                return _traced(func, args, kwargs or {})
            if kwargs is None or kwargs.get("device") is None:
                return func(*args, **(kwargs or {}))
            return func(*args, **_on_host(kwargs))
        kwargs = dict(kwargs or {})
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if kwargs.get("device") is None and func in _CONSTRUCTORS and default_device.CURRENT_DEVICE is not None:
            kwargs["device"] = default_device.CURRENT_DEVICE
        if kwargs.pop("pin_memory", False):
            _check_pin()
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        place = place_of(kwargs["device"])
        # one that is neither, such as `meta`, makes what it says
        return func(*args, **kwargs) if place is None else _make(func, args, kwargs, place)


def _traced(func: Any, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """What dynamo traces for those that may read the host, or name a device by its place."""
    if _reads_host(func, args, kwargs):
        return torch.ops.sim_hpu.host_read(args[0])
    if func is one_hot and len(args) == 2:
        return torch.ops.sim_hpu.one_hot(*args)
    return func(*[HOST if _names_hpu(value) else value for value in args], **_on_host(kwargs))


def _reads_host(func: Any, args: Args, kwargs: Mapping[str, Any]) -> bool:
    """Whether traced Python asks for a copy on the host; a tensor's own device is the CPU there, too."""
    if func is torch.Tensor.cpu:
        return True
    asked = args[1] if len(args) > 1 else kwargs.get("device")
    return func is torch.Tensor.to and isinstance(asked, str) and asked == "cpu"


def _on_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """While torch.compile traces, all tensors are on the CPU."""
    return {name: HOST if _names_hpu(value) else value for name, value in kwargs.items()}


def _names_hpu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "hpu") or (
        isinstance(value, str) and (value == "hpu" or value.startswith("hpu:"))
    )


def _make(func: Any, args: Args, kwargs: Kwargs, place: Place) -> Any:
    """A factory with a device."""
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
    non_blocking = bool(kwargs.get("non_blocking")) or any(value is True for value in args[1:])
    if here == "card" and state.region is None and late_copies.is_late_to_host(converted, converted, non_blocking):
        return _leave_late(func, converted)
    moved = move(converted, target, func, from_card=here == "card")
    if here == "host" and late_copies.is_late(tensor, moved, non_blocking):
        late_copies.delay(state.queue, tensor, moved)
    return moved


def _leave_late(func: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A copy to the host that does not wait."""
    garbage.check_read(func.__name__, tensor)
    state.cut()
    with state.make("host"):
        copy = torch.empty_like(tensor)
    late_copies.deliver(state.queue, tensor, copy)
    return copy


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
    """There is no driver that could pin."""
    _check_pin()
    return args[0]


def _check_pin() -> None:
    """The pinned allocator belongs to a device that this process has acquired (duty 33)."""
    if not memory.is_started:
        duties.refuse(
            late_copies.LATE, "pin_memory", "nothing was put on the card yet, and its allocator pins", "do not pin"
        )


def _one_hot(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A kernel of the card; torch's own reads its input on the host."""
    tensor, classes = args[0], kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    if not is_on_card(tensor):
        return func(*args, **kwargs)
    return torch.ops.sim_hpu.one_hot(tensor, int(tensor.max()) + 1 if classes < 0 else classes)


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
    one_hot: _one_hot,
}
