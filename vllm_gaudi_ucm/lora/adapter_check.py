"""Checks of a loaded adapter: every matrix belongs to a layer of the model, has its sizes, and is finite.

vLLM copies what it finds into the places that it has: it would take smaller matrices as they are, leave
out the matrices of a layer that the model lacks, and let an infinite one reach requests of other adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_ucm.vllm_api.lora import (
    BaseLayerWithLoRA,
    BaseLinearLayerWithLoRA,
    LogitsProcessorWithLoRA,
    PPMissingLayer,
    VocabParallelEmbeddingWithLoRA,
    full_outputs,
)

if TYPE_CHECKING:
    from torch import nn

    from vllm_gaudi_ucm.vllm_api.lora import LoRALayerWeights, LoRAModel, LRUCacheLoRAModelManager


class AdapterError(ValueError):
    """Raised for an adapter that cannot be used; the engine goes on without it."""


class Sizes(NamedTuple):
    """The sizes of a checkpoint's matrices for one layer. outputs: None if slices of a layer share them."""

    inputs: int
    outputs: int | None


def check_adapter(lora: LoRAModel, manager: LRUCacheLoRAModelManager, max_rank: int) -> None:
    """Raises AdapterError unless an adapter fits the layers of the model on this worker.

    lora: as it was read, before matrices of the same layer are put together.
    """
    if not lora.loras:
        raise AdapterError("found no matrices, expected some of lora_A and lora_B")
    places = {
        child: (name, number)
        for name, children in manager.packed_modules.items()
        for number, child in enumerate(children)
    }
    for name, weights in lora.loras.items():
        owner, number = places.get(name, (name, 0))
        module = manager.modules.get(owner)
        if module is not None:
            if _is_convolution(module):
                raise AdapterError(
                    f"found matrices for {name}, which is a convolution, expected linear layers; merge the adapter "
                    "into the checkpoint"
                )
            _check_layer(
                name, weights, _sizes(module, number, len(manager.packed_modules.get(owner, ())) or 1), max_rank
            )
        elif not _is_elsewhere(manager.model, owner):
            known = ", ".join(sorted({one.rpartition(".")[2] for one in (*manager.modules, *places)}))
            raise AdapterError(
                f"found matrices for {name}, expected layers of the model that take adapters ({known}); experts do "
                "not, nor layers that --lora-target-modules leaves out"
            )


def _check_layer(name: str, weights: LoRALayerWeights, sizes: Sizes, max_rank: int) -> None:
    down, up = weights.lora_a, weights.lora_b
    if down is None or up is None:
        raise AdapterError(f"found one matrix for {name}, expected lora_A and lora_B")
    outputs = up.shape[0] if sizes.outputs is None else sizes.outputs
    rank = down.shape[0] if down.dim() == 2 else 0
    if tuple(down.shape) != (rank, sizes.inputs) or tuple(up.shape) != (outputs, rank):
        raise AdapterError(
            f"found lora_A {list(down.shape)} and lora_B {list(up.shape)} for {name}, expected "
            f"[rank, {sizes.inputs}] and [{outputs}, rank]; it is an adapter of another model"
        )
    if rank > max_rank:
        raise AdapterError(f"found rank {rank} for {name}, expected at most {max_rank} (--max-lora-rank)")
    if not bool(torch.isfinite(down).all()) or not bool(torch.isfinite(up * weights.scaling).all()):
        raise AdapterError(f"found numbers that are not finite in {down.dtype} for {name}, expected finite ones")


def _sizes(module: BaseLayerWithLoRA, number: int, children: int) -> Sizes:
    """Returns the sizes of the matrices for one of the `children` that a checkpoint has of a layer."""
    if isinstance(module, BaseLinearLayerWithLoRA):
        outputs = full_outputs(module)
        return Sizes(module.base_layer.input_size, outputs[number] if len(outputs) == children else None)
    if isinstance(module, VocabParallelEmbeddingWithLoRA):
        return Sizes(module.base_layer.org_vocab_size, module.base_layer.embedding_dim)
    assert isinstance(module, LogitsProcessorWithLoRA), "no other layer takes adapters"
    return Sizes(module.hidden_size, module.base_layer.vocab_size)


def _is_convolution(module: BaseLayerWithLoRA) -> bool:
    """Returns whether vLLM has made a linear layer of a convolution: a layer with a state reads its weight alone."""
    if not isinstance(module, BaseLinearLayerWithLoRA):
        return False
    own = module.base_layer.named_parameters(recurse=False)
    return any(name == "weight" and parameter.dim() > 2 for name, parameter in own)


def _is_elsewhere(model: nn.Module, name: str) -> bool:
    """Returns whether a layer is in another stage of the pipeline."""
    found: object = model
    for part in name.split("."):
        if isinstance(found, PPMissingLayer):
            return True
        found = getattr(found, part, None)
    return isinstance(found, PPMissingLayer)
