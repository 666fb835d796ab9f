"""Models with every weight from their checkpoint: `vllm.model_executor.model_loader`.

Internal: `get_model_loader`, whose `load_model` calls its own `load_weights`, and this one the model's; the layers that
fuse several tensors of a checkpoint, `QKVParallelLinear`, `MergedColumnParallelLinear` and `RoutedExperts`, with the
arguments by which their `weight_loader` knows a tensor; `packed_modules_mapping` and `get_expert_mapping`, which name
the fused modules; `BaseKVCacheMethod`, whose scales have defaults.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader import get_model_loader
from vllm.transformers_utils.config import iter_rope_parameters

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig


NAMED_IN_ERRORS = 8
ONE_FORMAT = (
    "Matrices that the model computes as one layer (query, key and value; gate and up) need one format: quantise all "
    "of them, or leave out all of them"
)

Weights = Iterable[tuple[str, Tensor]]
"""Tensors with their names in a checkpoint."""

Part = tuple[int | None, str | int | None]
"""An expert (None: all of them, or no expert), and one of the matrices that are fused (None: all of them)."""


def get_model(
    *,
    vllm_config: VllmConfig,
    prefix: str = "",
    load_config: LoadConfig | None = None,
    weights: Weights | None = None,
    model_config: ModelConfig | None = None,
) -> nn.Module:
    """Loads a model as vLLM's `get_model` does, and refuses a checkpoint that lacks a tensor, before it loads weights
    also a model whose positions end before `--max-model-len`.

    weights: tensors with their names in a checkpoint, instead of the checkpoint's. model_config: of a draft head, which
    is built with the configuration of its model.

    Reason: vLLM compares names of unquantised models alone, passes over every layer that has a method of weights, and
    takes a fused layer for loaded when one of its tensors came. The rest is memory that was never written.
    Remove when: `track_weights_loading` looks at each layer and each tensor of a fused one.
    Raises ValueError with the names of the tensors, or of the table of positions.
    """
    vllm_config = with_long_tables(vllm_config)
    loader = get_model_loader(load_config or vllm_config.load_config)
    fill = loader.load_weights if weights is None else _filling_with(weights)
    # vLLM's own switch, in `model_loader_extra_config`
    watches = getattr(loader, "enable_weights_track", None) is not False

    def load_weights(model: nn.Module, model_config: ModelConfig) -> None:
        refuse_far_positions(model, model_config)
        if watches:
            WeightWatch(model).load(fill, model_config)
        else:
            fill(model, model_config)

    cast(Any, loader).load_weights = load_weights
    own = vllm_config.model_config if model_config is None else model_config
    return loader.load_model(vllm_config=vllm_config, model_config=own, prefix=prefix)


def _filling_with(weights: Weights) -> Callable[[nn.Module, ModelConfig], None]:
    def fill(model: nn.Module, model_config: ModelConfig) -> None:
        cast(Any, model).load_weights(weights)

    return fill


@contextmanager
def weights_of(vllm_config: VllmConfig, path: str | None) -> Iterator[None]:
    """Makes the loader read the checkpoint at a path, from now on; after an exception, the one before. None: no other.

    Reason: `reload_weights` of vLLM's runners sets these attributes, and does not take them back.
    Remove when: a loader takes the path as an argument.
    """
    config = vllm_config.model_config
    names = ("model", "model_weights", "revision")
    before = {name: getattr(config, name) for name in names}
    if path is not None:
        config.model, config.model_weights, config.revision = path, "", None
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(config, name, value)
        raise


class WeightWatch:
    """Sees which parameters of a model, and which parts of fused ones, are loaded from a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parts: dict[int, set[Part]] = {}
        self._names: set[str] | None = None
        self._before: dict[int, weakref.ref[nn.Parameter]] = {}
        self._last = ""

    def load(self, fill: Callable[[nn.Module, ModelConfig], None], model_config: ModelConfig) -> None:
        """Calls a loader's `load_weights`.

        Raises ValueError for a tensor that no weight takes, and when the model has loaded its weights and some are
        missing.
        """
        model = cast(Any, self._model)
        own = model.load_weights

        def load_weights(weights: Iterable[tuple[str, Tensor]], *arguments: Any, **named: Any) -> set[str] | None:
            try:
                names = own(self._seen(weights), *arguments, **named)
            except (AttributeError, KeyError) as error:
                raise ValueError(
                    f"The checkpoint {model_config.model} has the tensor {self._last}, for which the model has no "
                    f"weight. Expected: tensors in the formats that its configuration names. {ONE_FORMAT}"
                ) from error
            self._names = None if names is None else set(names)
            if names is not None:
                self._check(model_config.model)
            return self._names

        loaders = [(weight, cast(Any, weight).weight_loader) for weight in _with_loader(model)]
        self._before = {id(weight): weakref.ref(weight) for weight in model.parameters()}
        model.load_weights = load_weights
        for weight, loader in loaders:
            weight.weight_loader = self._watched(weight, loader)
        try:
            fill(model, model_config)
        finally:
            del model.load_weights
            for weight, loader in loaders:
                weight.weight_loader = loader

    def _seen(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._last = name
            yield name, tensor

    def _watched(self, weight: nn.Parameter, loader: Callable[..., object]) -> Callable[..., object]:
        signature = inspect.signature(loader)

        def load(*arguments: Any, **named: Any) -> object:
            found = loader(*arguments, **named)
            # experts of other ranks: False
            if found is not False:
                given = signature.bind(*arguments, **named).arguments
                self._parts.setdefault(id(weight), set()).update(_parts_of_call(given))
            return found

        return load

    def _check(self, checkpoint: str) -> None:
        missing = list(self._missing())
        if not missing:
            return
        more = len(missing) - NAMED_IN_ERRORS
        named = ", ".join(missing[:NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")
        raise ValueError(
            f"The checkpoint {checkpoint} lacks tensors that the model needs: {named}. Expected: a tensor for every "
            "weight of the model. Copy or download the checkpoint again, or write it again with the tool that made it"
        )

    def _missing(self) -> Iterator[str]:
        """Returns the names in the checkpoint, as far as vLLM tells how it fuses tensors."""
        named = self._model.named_parameters(remove_duplicate=False)
        loaded = {id(weight) for name, weight in named if name in (self._names or ())}
        seen: set[int] = set()
        for prefix, module in self._model.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                # a tied weight has several names, of which one is loaded
                if id(weight) in seen or _has_default(module, name, weight) or self._is_made_of_a_tensor(weight):
                    continue
                seen.add(id(weight))
                parts = self._parts.get(id(weight))
                if parts is None:
                    if id(weight) not in loaded:
                        yield from self._named_apart(prefix, name) or [f"{prefix}.{name}".lstrip(".")]
                elif (None, None) not in parts:
                    fused = self._parts_here(prefix, module, name)
                    yield from (tensor for part, tensor in fused if part not in parts and (None, part[1]) not in parts)

    def _is_made_of_a_tensor(self, weight: nn.Parameter) -> bool:
        """Returns whether the model made this parameter while it loaded, as vLLM does with the bias of a classifier."""
        before = self._before.get(id(weight))
        is_new = before is None or before() is not weight
        return is_new and not hasattr(weight, "weight_loader")

    def _named_apart(self, prefix: str, name: str) -> list[str]:
        """The tensors of a fused linear layer's parameter, if the model names them."""
        layers, _, own = prefix.rpartition(".")
        found = getattr(self._model, "packed_modules_mapping", {}).get(own, ())
        return [f"{layers}.{layer}.{name}" for layer in found]

    def _parts_here(self, prefix: str, module: nn.Module, name: str) -> Iterator[tuple[Part, str]]:
        """The parts that this rank has of a parameter, and the tensors that hold them."""
        if isinstance(module, RoutedExperts):
            before = prefix.rpartition(".experts")[0]
            for weights, tensor, expert, matrix in module.get_expert_mapping():
                start = weights.rpartition(".")[2]
                if name.startswith(start) and module.expert_map_manager.map_global_to_local(expert) != -1:
                    yield (expert, matrix), f"{before}.{tensor}{name.removeprefix(start)}"
            return
        kinds: tuple[str | int, ...] = ()
        if isinstance(module, QKVParallelLinear):
            kinds = ("q", "k", "v")
        elif isinstance(module, MergedColumnParallelLinear):
            kinds = tuple(range(len(module.output_sizes)))
        named = self._named_apart(prefix, name)
        if len(named) != len(kinds):
            named = [f"{prefix}.{name} (its part {kind})" for kind in kinds]
        yield from (((None, kind), tensor) for kind, tensor in zip(kinds, named, strict=True))


def _with_loader(model: nn.Module) -> list[Any]:
    return [weight for weight in model.parameters() if getattr(weight, "weight_loader", None) is not None]


def _parts_of_call(given: dict[str, Any]) -> Iterator[Part]:
    """given: the arguments of a call of a `weight_loader`."""
    matrix = given.get("loaded_shard_id", given.get("shard_id"))
    expert = given.get("expert_id")
    if expert is not None and given["loaded_weight"].dim() == 3:
        expert = None
    for kind in matrix if isinstance(matrix, tuple) else (matrix,):
        yield expert, kind


def _has_default(module: nn.Module, name: str, weight: nn.Parameter) -> bool:
    """True if a checkpoint may lack it: an empty placeholder, a scale of the KV cache, or some biases of experts."""
    if isinstance(module, RoutedExperts) and name.endswith("_bias"):
        return not module.moe_config.has_bias
    return weight.numel() == 0 or isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)


# angles that are the same function of the position, however long the table is
ENDLESS = {"default", "llama3"}


def with_long_tables(vllm_config: VllmConfig) -> VllmConfig:
    """Returns a configuration for a model whose rotary tables reach `--max-model-len`.

    Reason: a table ends at `max_position_embeddings`, even if the user asks for a longer context, and a step that reads
    a row past it ends the engine. Other kinds of angles than `ENDLESS` depend on the table's length.
    Remove when: `get_rope` makes tables for `--max-model-len`.
    """
    model_config = vllm_config.model_config
    text: Any = model_config.hf_text_config
    kinds = {parameters["rope_type"] for parameters in iter_rope_parameters(text)}
    ends = getattr(text, "max_position_embeddings", None)
    if not kinds or not kinds <= ENDLESS or ends is None or ends >= model_config.max_model_len:
        return vllm_config
    longer = copy(text)
    longer.max_position_embeddings = model_config.max_model_len
    found = copy(vllm_config)
    found.model_config = copy(model_config)
    if model_config.hf_config is text:
        found.model_config.hf_config = longer
    found.model_config.hf_text_config = longer
    return found


def refuse_far_positions(model: nn.Module, model_config: ModelConfig) -> None:
    """Raises ValueError for a model with a table of positions that ends before `--max-model-len`.

    Reason: vLLM takes `--max-model-len` beyond a model's positions with `VLLM_ALLOW_LONG_MAX_MODEL_LEN=1`.
    Remove when: its models look at the length of their tables.
    """
    asked = model_config.max_model_len
    for name, ends in _tables(model, model_config):
        if ends < asked:
            raise ValueError(
                f"--max-model-len: found {asked}, expected at most {ends}: {model_config.model} has no more positions "
                f"(its layer {name} has a table of them). Set --max-model-len {ends}, or take a model with a longer "
                "context"
            )


def _tables(model: nn.Module, model_config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Names of layers that have a table, and how many positions it is for."""
    own = getattr(model_config.hf_text_config, "max_position_embeddings", None)
    for name, layer in model.named_modules():
        table = getattr(layer, "cos_sin_cache", None)
        if table is not None:
            yield name, len(table)
        elif hasattr(layer, "long_short_cos_sin_cache"):
            rotary = cast(Any, layer)
            long = rotary.use_long_rope
            yield name, rotary.max_position_embeddings if long else rotary.original_max_position_embeddings
        elif isinstance(layer, nn.Embedding):
            positions = layer.num_embeddings - getattr(layer, "offset", 0)
            # tables of other things have other lengths
            if positions == own:
                yield name, positions
