"""Compiler `hpu_backend`: counts graphs, and runs them under the card's constraints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from habana_frameworks.torch.simulator import device_mode
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.recipes import recipes
from habana_frameworks.torch.simulator.state import is_lazy, state
from habana_frameworks.torch.simulator.tape import tensors_in

from torch._dynamo import register_backend, trace_rules
from torch.fx import GraphModule

NAME = "hpu_backend"
_OPTIONS = frozenset({"force_static_compile"})


def register_compiler() -> None:
    """Makes `torch.compile(backend="hpu_backend")` known.

    Dynamo must not compile the stand-in itself where it runs between two graphs, only follow the mode's mapping of
    devices where it traces a call.
    """
    register_backend(_compile, name=NAME)
    trace_rules.add("habana_frameworks.torch")
    trace_rules.BUILTIN_INLINE_WHEN_CALLED.add(device_mode.__file__)


def _compile(
    graph: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Raises ValueError for unknown options, RuntimeError in lazy mode, where the bridge compiles nothing."""
    unknown = set(options or {}) - _OPTIONS
    if unknown:
        raise ValueError(f"{NAME}: options {sorted(unknown)} are unknown, expected of {sorted(_OPTIONS)}")
    if is_lazy():
        raise RuntimeError(f"{NAME} needs PT_HPU_LAZY_MODE=0")
    card.compiled_graphs += 1

    def run(*inputs: Any) -> Any:
        with state.captured(NAME) as stream:
            outputs = graph.forward(*inputs)
            recipe = stream.take()
        for tensor in tensors_in(outputs):
            memory.put(tensor)
        if recipe is not None:
            recipes.need(recipe)
        return outputs

    return run
