"""vLLM's managers of adapters, with the weights of slots in the layout of `ops/lora`, and checks of what is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.lora.adapter_check import AdapterError, check_adapter
from vllm_gaudi_ucm.lora.joined_layers import can_join, compute_joined, join
from vllm_gaudi_ucm.lora.layer_adapters import LayerAdapters
from vllm_gaudi_ucm.lora.step_routes import StepRoutes
from vllm_gaudi_ucm.ops.lora.weights import AdapterWeights
from vllm_gaudi_ucm.vllm_api.lora import (
    BaseLayerWithLoRA,
    BaseLinearLayerWithLoRA,
    LogitsProcessorWithLoRA,
    LoRAAdapterNotFoundError,
    LoRAModel,
    LoRARequest,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    MoERunner,
    SupportsLoRA,
    VocabParallelEmbeddingWithLoRA,
    write_through,
)

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig


logger = plugin_logger(__name__)


class SlotManager(LRUCacheLoRAModelManager):
    """Gives adapters slots, and writes their weights there. The memory of all slots is allocated with the layers.

    On a Gaudi an adapter is written in host memory, and layers are copied as a whole: a write to a part of a tensor
    would be compiled for each place and shape, while requests wait.
    """

    def _create_lora_modules(self) -> None:
        self.weights: dict[str, AdapterWeights] = {}
        self._written: dict[str, AdapterWeights] = {}
        experts = {
            name.rpartition(".")[2] for name, module in self.model.named_modules() if isinstance(module, MoERunner)
        }
        # an adapter of experts is then refused as one of an unknown module
        self.supported_lora_modules = [name for name in self.supported_lora_modules if name not in experts]
        super()._create_lora_modules()

    def register_module(self, module_name: str, module: BaseLayerWithLoRA) -> None:
        """Lays out a layer's weights anew as soon as it is made: there are never two copies of all layers."""
        super().register_module(module_name, module)
        weights = _laid_out(module)
        written = weights.on_host() if weights.up.device.type == "hpu" else weights
        write_through(module, *_views(module, written))
        self.weights[module_name], self._written[module_name] = weights, written

    def begin_steps(self, routes: StepRoutes) -> None:
        """Gives each layer its adapters, now that all layers are made. routes: used in every step."""
        for name, module in self.modules.items():
            shared = cast(LayerAdapters, module.punica_wrapper)
            adapters = shared.of_layer(self.weights[name], routes)
            module.set_mapping(adapters)
            if routes.begins and isinstance(module, BaseLinearLayerWithLoRA):
                module.register_forward_pre_hook(adapters.begin)
                if adapters.weights.joined is not None:
                    compute_joined(module, adapters)
        linear = [self.weights[name] for name, one in self.modules.items() if isinstance(one, BaseLinearLayerWithLoRA)]
        if routes.begins and linear:
            # in the smallest layer, the products of adapters take the largest share
            able = [weights for weights in linear if weights.joined is not None] or linear
            routes.current.implementation.measure(min(able, key=lambda one: one.down.shape[1] * len(one.up)))

    def activate_adapter(self, lora_id: int) -> bool:
        is_new = super().activate_adapter(lora_id)
        if is_new:
            for name, weights in self.weights.items():
                if self._written[name] is not weights:
                    weights.copy_from(self._written[name])
        return is_new


def _laid_out(module: BaseLayerWithLoRA) -> AdapterWeights:
    """Returns weights without adapters for a layer."""
    if isinstance(module, BaseLinearLayerWithLoRA):
        if can_join(module):
            return join(module)
        return _zeros_like(module.lora_a_stacked[0], module.lora_b_stacked)
    if isinstance(module, LogitsProcessorWithLoRA):
        return _zeros_like(module.lora_a_stacked, (module.lora_b_stacked,))
    if isinstance(module, VocabParallelEmbeddingWithLoRA):
        # its first product is a look-up in vLLM's own layout
        slots, _, outputs, rank = module.lora_b_stacked.shape
        up = module.lora_b_stacked.new_zeros(outputs, slots * rank)
        return AdapterWeights(module.lora_a_stacked_2d, up, slots, (outputs,))
    raise AdapterError(f"layers with adapters: found {type(module).__name__}, expected a linear layer or an embedding")


def _views(module: BaseLayerWithLoRA, written: AdapterWeights) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Returns views of each slice's matrices, in the shapes that vLLM writes."""
    if isinstance(module, VocabParallelEmbeddingWithLoRA):
        return (written.down.view(module.lora_a_stacked.shape),), written.up_of_slices()
    return written.down_of_slices(), written.up_of_slices()


def _zeros_like(down: torch.Tensor, ups: tuple[torch.Tensor, ...]) -> AdapterWeights:
    slots, _, rank, inputs = down.shape
    return AdapterWeights.zeros(inputs, [up.shape[2] for up in ups], slots, rank, down.dtype, down.device)


class AdapterManager(LRUCacheWorkerLoRAManager):
    """Loads adapters, keeps the last used ones in host memory, and gives the adapters of a step slots on the device.

    Args:
        vllm_config: the engine's.
        model: the loaded model, whose layers get slots.
        device: device of the model.
        captured: forwards are captured at static shapes.
        agree: returns whether a value is true on all workers, which make the same calls in the same order.

    Raises ValueError if the model has no layers that take adapters.
    """

    _manager_cls = SlotManager
    _adapter_manager: SlotManager

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        device: torch.device,
        *,
        captured: bool,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._agree = agree
        super().__init__(vllm_config, device, cast(SupportsLoRA, model).embedding_modules)
        self.create_lora_manager(model, vllm_config)
        self.routes = StepRoutes(
            self.lora_config.max_loras,
            self.lora_config.max_lora_rank,
            vllm_config.scheduler_config.max_num_batched_tokens,
            device,
            captured=captured,
            regions=(VocabParallelEmbeddingWithLoRA,),
        )
        self._adapter_manager.begin_steps(self.routes)
        logger.info(
            "Slots for %d adapters of rank %d take %.2f GiB", self.routes.slots, self.routes.rank, self.nbytes / 2**30
        )

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all slots on the device."""
        return sum(weights.nbytes for weights in self._adapter_manager.weights.values())

    def load(self, adapter: LoRARequest) -> bool:
        """Loads an adapter and gives it a slot, on all workers or on none. Raises any error of reading it.

        Returns whether it is in host memory.
        """
        is_loaded, error = False, None
        try:
            is_loaded = self.add_adapter(adapter)
        except Exception as raised:  # of any kind: a file of a user's must not end the engine
            error = raised
        if self._agree(error is None):
            return is_loaded
        if not self._agree(error is not None):
            self.remove_adapter(adapter.lora_int_id)
        raise error or AdapterError(f"{_named(adapter)}: found an error on another worker, whose log has it")

    def slots_of(self, requests: dict[int, LoRARequest]) -> dict[int, int | Exception]:
        """Gives the adapters of a step slots, and loads those that are not in host memory.

        requests: by number of the adapter; vLLM's scheduler has at most as many in a step as there are slots.

        Returns the slot of each adapter, or the error if it cannot be loaded.
        """
        manager, found = self._adapter_manager, dict[int, "int | Exception"]()
        # those that have a slot first, so that it is not given to another one
        present = [number for number in requests if number in manager.lora_index_to_id]
        for number in present:
            # both count as its use
            manager.get_adapter(number)
            manager.activate_adapter(number)
        # in one order on all workers
        for number in sorted(requests.keys() - set(present)):
            try:
                self.load(requests[number])
            except Exception as error:
                found[number] = error
        places = {number: slot for slot, number in enumerate(manager.lora_index_to_id) if number is not None}
        return {number: found[number] if number in found else places[number] for number in requests}

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        try:
            lora = super()._load_adapter(lora_request)
            check_adapter(lora, self._adapter_manager, self.lora_config.max_lora_rank)
        except LoRAAdapterNotFoundError:
            raise
        except Exception as error:  # of vLLM, safetensors or json: none of them names the adapter
            raise AdapterError(f"{_named(lora_request)}: {error}") from error
        return lora


def _named(adapter: LoRARequest) -> str:
    return f"LoRA adapter {adapter.lora_name!r} ({adapter.lora_path})"
