"""A region that `hpu_backend` has compiled, run node by node under the card's rules."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from habana_frameworks.torch.dynamo.clusters import Cluster, cut
from habana_frameworks.torch.dynamo.compile_only import leave_garbage
from habana_frameworks.torch.dynamo.fallbacks import find_fallbacks
from habana_frameworks.torch.dynamo.options import Options
from habana_frameworks.torch.dynamo.writes import find_writes
from habana_frameworks.torch.internal.bridge_config import compile_only
from habana_frameworks.torch.simulator.card import card
from habana_frameworks.torch.simulator.duties import duties
from habana_frameworks.torch.simulator.garbage import garbage
from habana_frameworks.torch.simulator.memory import memory
from habana_frameworks.torch.simulator.minus_one import run_with_pads
from habana_frameworks.torch.simulator.operators import check_known
from habana_frameworks.torch.simulator.own_formats import run_own_format
from habana_frameworks.torch.simulator.recipes import recipes
from habana_frameworks.torch.simulator.rules import check_operator, named_arguments, reads_host
from habana_frameworks.torch.simulator.state import state
from habana_frameworks.torch.simulator.tape import tensors_in

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

NAME = "hpu_backend"
_WHERE = torch.ops.aten.where.self
_INDEX_COPY_ = torch.ops.aten.index_copy_.default


class _Call(threading.local):
    """Of one thread. dropped: storages of which writes do not arrive in the call that is running."""

    dropped: frozenset[int] = frozenset()


_call = _Call()


@contextmanager
def dropping(storages: frozenset[int]) -> Iterator[None]:
    """Writes to these storages (their addresses) do not arrive while it lasts."""
    before, _call.dropped = _call.dropped, storages
    try:
        yield
    finally:
        _call.dropped = before


class Region:
    """One graph after functionalisation. Called with the list of its inputs; returns the list of its outputs."""

    def __init__(self, module: GraphModule, options: Options) -> None:
        nodes = list(module.graph.nodes)
        self._module, self._options = module, options
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._constants = [node for node in nodes if node.op == "get_attr"]
        computed = [node for node in nodes if node.op == "call_function"]
        (self._outputs,) = (node.args[0] for node in nodes if node.op == "output")
        self._eager = find_fallbacks(computed, static=options.force_static_compile)
        self._writes = find_writes(
            module.graph,
            self._eager,
            inplace_index_copy=options.keep_input_mutations and options.use_inplace_index_copy,
        )
        self._parts = cut(computed, self._eager)
        self._last = _last_uses(computed, self._outputs)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values = dict(zip(self._inputs, inputs, strict=True))
        inputs.clear()
        values.update({node: getattr(self._module, str(node.target)) for node in self._constants})
        self._check_inputs(values)
        with torch.no_grad(), state.captured(NAME):
            self._charge(values)
            if compile_only():
                return self._compile_only(values)
            for part in self._parts:
                self._run_cluster(part, values) if isinstance(part, Cluster) else self._run_eagerly(part, values)
        outputs = [values[node] if isinstance(node, Node) else node for node in self._outputs]
        for tensor in tensors_in(outputs):
            memory.put(tensor)
        return outputs

    def _check_inputs(self, values: dict[Node, Any]) -> None:
        tensors = [values[node] for node in self._inputs if isinstance(values[node], Tensor)]
        for tensor in tensors:
            if not compile_only() and garbage.is_in(tensor):
                finding = f"an input, {tensor.dtype} {tuple(tensor.shape)}, holds what a compile-only warm-up left"
                duties.warn(22, NAME, finding, "fill persistent tensors again after the warm-up")

    def _charge(self, values: dict[Node, Any]) -> None:
        """What writes cost (duties 12 and 13)."""
        for charge in self._writes.charges:
            target = values[charge.target]
            if duties.on(charge.duty):
                card.copied_bytes += target.numel() * target.element_size()
            finding = f"copies its whole target, {target.dtype} {tuple(target.shape)}: {charge.why}"
            duties.warn(
                charge.duty, charge.operator, finding, "one index_copy_ into a tensor of its own; read the result"
            )

    def _run_cluster(self, cluster: Cluster, values: dict[Node, Any]) -> None:
        self._need(cluster, [values[node] for node in cluster.inputs])
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            for node in cluster.nodes:
                args, kwargs = _arguments(node, values)
                values[node] = self._compute(node, args, kwargs)
                self._forget(node, values)
        card.executed += cluster.operators

    def _need(self, cluster: Cluster, inputs: Sequence[Any]) -> None:
        """The recipe of a cluster (duty 7), and what its single slot costs (duty 8)."""
        if cluster.changes_shape(inputs, static=self._options.force_static_compile and duties.on(8)):
            card.graph_compiles += 1
            card.pipeline_drains += 1
        if cluster.operators:
            recipes.need(cluster.recipe(inputs))
            card.launches += 1

    def _compute(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func = node.target
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)  # type: ignore[operator]
        if reads_host(func):
            duties.refuse(21, func, f"a host read inside a region captured by {NAME}", "read after the region")
        check_known(func)
        named = named_arguments(func, args, kwargs)
        check_operator(func, named)
        if node in self._writes.copies.values():
            return self._write(func, *args)
        if node in self._writes.free and _storage(args[0]) not in _call.dropped:
            func = _INDEX_COPY_
        elif func is _WHERE:
            return _where(*args)
        elif duties.minus_one and (padded := run_with_pads(func, named)) is not NotImplemented:
            return padded
        found = run_own_format(func, args, kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found

    def _write(self, func: OpOverload, target: Tensor, value: Tensor) -> Tensor:
        """The end of a mutation. What was done in place needs none."""
        if value is target:
            return target
        if _storage(target) in _call.dropped:
            finding = f"a write to {target.dtype} {tuple(target.shape)}, which shares storage with another input or is "
            finding += "a view with another dtype"
            if duties.spoils(14, func, finding, "write to a tensor with a storage of its own"):
                return value
        return func(target, value)

    def _run_eagerly(self, node: Node, values: dict[Node, Any]) -> None:
        self._allow_fallback(node)
        args, kwargs = _arguments(node, values)
        for tensor in tensors_in(args) + tensors_in(kwargs):
            memory.put(tensor)
        with state.between_clusters():
            if isinstance(node.target, HigherOrderOperator):
                with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                    values[node] = node.target(*args, **kwargs)
            else:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        for tensor in tensors_in(values[node]):
            memory.put(tensor)
        self._forget(node, values)

    def _allow_fallback(self, node: Node) -> None:
        duty, why = self._eager[node]
        finding = f"eager fallback inside a region: {why}"
        if not self._options.use_eager_fallback:
            duties.refuse(duty, node.target, finding, "PT_HPU_USE_EAGER_FALLBACK=0 forbids it")
        duties.warn(duty, node.target, finding, "keep it outside of regions")
        card.eager_fallbacks += 1

    def _compile_only(self, values: dict[Node, Any]) -> list[Any]:
        for node in self._eager:
            self._allow_fallback(node)
        found = leave_garbage(self._parts, self._outputs, values, self._need)
        for target in self._writes.copies:
            if duties.on(22):
                garbage.fill(values[target])
        return found

    def _forget(self, node: Node, values: dict[Node, Any]) -> None:
        for done in self._last.get(node, ()):
            values.pop(done, None)


def _last_uses(nodes: Sequence[Node], outputs: Any) -> dict[Node, list[Node]]:
    """Which values nobody needs after a node. Inputs stay: the caller holds them."""
    kept = {node for node in outputs if isinstance(node, Node)}
    last: dict[Node, Node] = {}
    for node in nodes:
        last.update(dict.fromkeys([node, *node.all_input_nodes], node))
    found: dict[Node, list[Node]] = {}
    for value, user in last.items():
        if value.op == "call_function" and value not in kept:
            found.setdefault(user, []).append(value)
    return found


def _arguments(node: Node, values: dict[Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments: Any = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda value: values[value])
    return arguments


def _where(condition: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """Integers come out the wrong way round (duty 16)."""
    result = torch.where(condition, chosen, other)
    if result.is_floating_point() or result.dtype == torch.bool:
        return result
    finding = f"{result.dtype} {tuple(result.shape)}: integers are miscompiled inside of a region"
    if duties.spoils(16, _WHERE, finding, "compute it with arithmetic, or on the host"):
        return torch.where(condition, other, chosen)
    return result


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
