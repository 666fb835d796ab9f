"""Collectives of the card: gloo carries them, within the limits of HCCL and with its detours."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from habana_frameworks.torch.simulator import step_agreement
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.state import state
from habana_frameworks.torch.simulator.tape import tensors_in

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

LIMITS = 36
NAMESPACES = frozenset({"c10d", "_c10d_functional"})
_ABSENT = frozenset({"gather_", "scatter_", "recv_any_source_", "monitored_barrier_", "allreduce_coalesced_"})
_REDUCTIONS = frozenset(
    {"allreduce_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_"}
    | {"all_reduce", "all_reduce_", "reduce_scatter_tensor"}
)
_ALL_REDUCES = frozenset({"allreduce_", "reduce_", "all_reduce", "all_reduce_"})
# Their shapes may differ between ranks.
_UNEVEN = frozenset({"alltoall_", "alltoall_base_", "all_to_all_single"})
_PAIRED = frozenset({"send", "recv_", "barrier", "wait_tensor", "_wrap_tensor_autograd"})
_OPERATIONS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MIN: "min", dist.ReduceOp.MAX: "max"}
_NATIVE = (torch.float32, torch.bfloat16)
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)

Args = Sequence[Any]


class Call(NamedTuple):
    """What is called in place of a collective, and what is made of what comes back."""

    args: Args
    finish: Callable[[Any], Any]


def prepare(func: OpOverload, args: Args, kwargs: Mapping[str, Any]) -> Call:
    """Raises HpuConstraintError for what HCCL lacks, and where ranks do not call the same. Host tensors pass."""
    name = func._schema.name.rpartition("::")[2]
    tensors = tensors_in(args)
    as_it_is = Call(args, lambda result: result)
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return as_it_is
    if not any(memory.serial(tensor) is not None for tensor in tensors):
        return as_it_is
    _check(name, args, tensors)
    if name not in _PAIRED:
        shapes = "" if name in _UNEVEN else f" {[tuple(tensor.shape) for tensor in tensors]}"
        step_agreement.compare(_group(args), f"{name} {tensors[0].dtype}{shapes}")
    dtype = tensors[0].dtype
    if name in _ALL_REDUCES and dtype not in _NATIVE:
        return _through_float32(name, args)
    if dtype in _EIGHT_BITS and name not in _PAIRED - {"send", "recv_"}:
        return _as_bytes(args)
    return as_it_is


def _check(name: str, args: Args, tensors: Sequence[Tensor]) -> None:
    operator = f"hccl {name}"
    if name in _ABSENT:
        duties.refuse(LIMITS, operator, "HCCL has no such collective", "all_gather, or send and recv")
    if name in _REDUCTIONS:
        operation = _reduction(args)
        if operation not in _OPERATIONS.values():
            duties.refuse(LIMITS, operator, f"reduction {operation}", "sum, min or max alone exist")
    for tensor in tensors:
        if tensor.element_size() == 1 and tensor.numel() % 2:
            found = f"{tensor.numel()} elements of one byte"
            duties.warn(LIMITS, operator, found, "keep one-byte payloads even: an odd one is resized and copied")


def _reduction(args: Args) -> str:
    """Of a functional collective the first text, of another one what its options were told."""
    named = next((value for value in args if isinstance(value, str)), None)
    return named if named is not None else _told.reduction


class _Told(threading.local):
    """Of a thread: the reduction that its last options were given. The operators hide it from Python."""

    reduction = "sum"


_told = _Told()


def watch_reductions() -> None:
    """From now on the options of collectives tell which reduction is asked for, just before the call."""
    for name in ("AllreduceOptions", "ReduceOptions", "ReduceScatterOptions"):
        setattr(distributed_c10d, name, _telling(getattr(distributed_c10d, name)))


def _telling(options: type) -> type:
    class Telling(options):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "reduceOp":
                known = [text for operation, text in _OPERATIONS.items() if value == operation]
                _told.reduction = known[0] if known else str(value)
            super().__setattr__(name, value)

    return Telling


def _group(args: Args) -> dist.ProcessGroup:
    for value in args:
        if isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(value)
    names = [value for value in args if isinstance(value, str)]
    return distributed_c10d._resolve_process_group(names[-1])


def _through_float32(name: str, args: Args) -> Call:
    """Cast, reduced, waited for, cast back: integers beyond 2**24 are rounded."""
    originals = args[0]
    card.synchronizations += 1
    state.queue.wait()

    def widen(tensor: Tensor) -> Tensor:
        wide = tensor.float()
        memory.put(wide)
        return wide

    if isinstance(originals, Tensor):
        return Call((widen(originals), *args[1:]), lambda result: _narrow(name, result, originals))
    wides = [widen(tensor) for tensor in originals]

    def finish(result: Any) -> Any:
        dist.Work.unbox(result[1]).wait()
        for original, wide in zip(originals, wides, strict=True):
            original.copy_(_cast(wide, original.dtype))
        return originals, result[1]

    return Call((wides, *args[1:]), finish)


def _narrow(name: str, result: Tensor, original: Tensor) -> Tensor:
    """Of a functional collective."""
    found = _cast(torch.ops._c10d_functional.wait_tensor(result), original.dtype)
    if name.endswith("_"):
        return original.copy_(found)
    memory.put(found)
    return found


def _cast(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers saturate where f32 has rounded beyond them."""
    if dtype.is_floating_point or dtype == torch.bool:
        return wide.to(dtype)
    limits = torch.iinfo(dtype)
    return wide.double().clamp(limits.min, limits.max).to(dtype)


def _as_bytes(args: Args) -> Call:
    """Data movement of 8-bit floats."""

    def opened(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.view(torch.uint8) if value.dtype in _EIGHT_BITS else value
        return [opened(item) for item in value] if isinstance(value, list | tuple) else value

    dtype = tensors_in(args)[0].dtype

    def finish(result: Any) -> Any:
        if isinstance(result, Tensor):
            return result.view(dtype)
        return (args[0], result[1]) if isinstance(result, tuple) else result

    return Call([opened(value) for value in args], finish)
