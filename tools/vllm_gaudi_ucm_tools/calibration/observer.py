"""Observes the largest magnitudes that a model's layers see, under the names of Intel Neural Compressor (INC)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from vllm_gaudi_ucm.layers.measured.measurements import LINEAR_KINDS, Node

if TYPE_CHECKING:
    import torch
    from torch import nn

Maxima = list["torch.Tensor | None"]


class _Observed(NamedTuple):
    """The largest magnitudes of one module. Numbers stay on the device until they are read."""

    inputs: Maxima
    outputs: Maxima


class LayerObserver:
    """A context in which the linear layers, caches and experts of a model are observed, on one worker.

    Steps must call modules: captured graphs and native graphs do not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._observed: dict[str, _Observed] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            self._hooks.extend(self._watch(name, module))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def nodes(self) -> dict[str, Node]:
        """Returns the maxima of modules that were called, in bfloat16. Raises ValueError if one is not finite."""
        found = {}
        for name, seen in self._observed.items():
            inputs, outputs = ([_number(name, one) for one in part if one is not None] for part in seen)
            if inputs:
                weight = self._weights.get(name)
                largest = None if weight is None else _number(name, weight.abs().amax())
                found[name] = Node(tuple(inputs), tuple(outputs), largest)
        return found

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        from vllm_gaudi_ucm.vllm_api.model import Attention, AttentionLayerBase
        from vllm_gaudi_ucm.vllm_api.moe import MoERunner

        if type(module).__name__ in LINEAR_KINDS:
            weight = dict(module.named_parameters(recurse=False)).get("weight")
            if weight is not None and weight.numel():
                self._weights[name] = weight.data
            yield self._before(module, {name: 0})
            if type(module).__name__ == "RowParallelLinear":
                yield self._after(module, name)
        elif isinstance(module, Attention):
            yield self._before(module, {f"{name}.impl.k_cache": 1, f"{name}.impl.v_cache": 2})
        elif isinstance(module, AttentionLayerBase) and name.endswith(".mla_attn"):
            # the latent, and the rotary key in the same row of the cache
            yield self._before(module, {f"{name}.impl.latent_cache_k": slice(1, 3)})
        elif isinstance(module, MoERunner):
            yield self._before(module, {f"{name}.moe_op": 0})

    def _before(self, module: nn.Module, places: dict[str, int | slice]) -> Any:
        """Observes arguments of a module's call. places: by the name under which they are kept."""

        def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            arguments = (*given, *named.values())
            for name, place in places.items():
                tensors = arguments[place] if isinstance(place, slice) else arguments[place : place + 1]
                seen = self._observed.setdefault(name, _Observed([None], []))
                for tensor in tensors:
                    _raise(seen.inputs, 0, tensor)

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def _after(self, module: nn.Module, name: str) -> Any:
        """Observes the result of a row-parallel layer: its own part, and the sum over ranks, which one worker has."""

        def hook(_: nn.Module, given: tuple[Any, ...], found: Any) -> None:
            seen = self._observed.setdefault(name, _Observed([None], []))
            if not seen.outputs:
                seen.outputs.extend((None, None))
            for place in range(2):
                _raise(seen.outputs, place, found[0] if isinstance(found, tuple) else found)

        return module.register_forward_hook(hook)


def _raise(maxima: Maxima, place: int, tensor: Any) -> None:
    """Keeps the larger of a maximum and the tensor's own; a layer that shares another's keys gets none."""
    if tensor is None or not tensor.numel():
        return
    largest, before = tensor.detach().abs().amax(), maxima[place]
    maxima[place] = largest if before is None else before.maximum(largest)


def _number(name: str, maximum: torch.Tensor) -> float:
    found = float(maximum.bfloat16())
    if not found < float("inf"):
        raise ValueError(
            f"PROMPTS: {name} has seen numbers that are not finite; take --dtype bfloat16 or float32, and prompts that "
            "the model answers"
        )
    return found
