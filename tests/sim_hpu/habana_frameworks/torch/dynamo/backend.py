"""Compiler `hpu_backend`: functionalises a graph as the bridge does, and runs it under the card's rules."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from habana_frameworks.torch import core
from habana_frameworks.torch.dynamo.disabled import watch_disabled
from habana_frameworks.torch.dynamo.inlining import inline_when_called
from habana_frameworks.torch.dynamo.limits import watch_limits
from habana_frameworks.torch.dynamo.measurements import measure_nothing
from habana_frameworks.torch.dynamo.options import Options, read_options
from habana_frameworks.torch.dynamo.region import NAME, Region, dropping
from habana_frameworks.torch.dynamo.traced_calls import pass_unchanged_calls
from habana_frameworks.torch.simulator import device_mode
from habana_frameworks.torch.simulator import state as thread_state
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.dtype_views import dtype_views
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.state import is_lazy

import torch
from torch import Tensor
from torch._dynamo import register_backend, trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.variables.torch import get_overridable_functions
from torch.fx import GraphModule
from torch.utils import _device as default_device
from torch.utils._python_dispatch import _disable_current_modes


def register_compiler() -> None:
    """Makes `torch.compile(backend="hpu_backend")` known.

    Dynamo must not compile the stand-in itself where it runs between two graphs, only follow the mode's mapping of
    devices where it traces a call, and what the bridge keeps free of graph breaks.
    """
    register_backend(hpu_backend, name=NAME)
    trace_rules.add("habana_frameworks.torch")
    inline_when_called(device_mode.__file__, core.__file__, thread_state.__file__)
    # torch 2.11 asks modes about some factories (torch.zeros) and not about others (torch.arange)
    get_overridable_functions().update(default_device._device_constructors())
    pass_unchanged_calls()
    measure_nothing()
    watch_disabled()
    watch_limits()


def hpu_backend(
    graph: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Raises ValueError for unknown options, RuntimeError in lazy mode, where the bridge compiles nothing."""
    chosen = read_options(options)
    if is_lazy():
        raise RuntimeError(f"{NAME} needs PT_HPU_LAZY_MODE=0")
    if torch._dynamo.eval_frame._stance.skip_guard_eval_unsafe:
        finding = "a new compilation after set_stance(skip_guard_eval_unsafe=True)"
        duties.refuse(24, NAME, finding, "warm every shape before it is set")
    card.compiled_graphs += 1
    compiled = _functionalise(graph, example_inputs, chosen)

    def run(*inputs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        if tensors and all(memory.serial(tensor) is None and tensor.dim() for tensor in tensors):
            return graph(*inputs)  # a graph of the host
        with dropping(_dropped(tensors)):
            return compiled(*inputs)

    return run


def _functionalise(graph: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    def compile_region(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        region = Region(module, options)

        def boxed(inputs: list[Any]) -> list[Any]:
            return region(inputs)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    functionalise = aot_autograd(
        fw_compiler=compile_region,
        inference_compiler=compile_region,
        keep_inference_input_mutations=options.keep_input_mutations,
    )
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        compiled: Callable[..., Any] = functionalise(graph, example_inputs)
    return compiled


def _dropped(inputs: Sequence[Tensor]) -> frozenset[int]:
    """Storages that two inputs share, or that an input sees with another dtype (duty 14)."""
    if not duties.on(14):
        return frozenset()
    with torch._C.DisableTorchFunction():
        storages = [tensor.untyped_storage()._cdata for tensor in inputs]
        shared = {storage for storage, number in Counter(storages).items() if number > 1}
        pairs = zip(inputs, storages, strict=True)
        cast = {storage for tensor, storage in pairs if dtype_views.made_as(tensor) != tensor.dtype}
    return frozenset(shared | cast)
