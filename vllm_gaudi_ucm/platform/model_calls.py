"""Calls to a worker that change the model of a running engine: its adapters, its weights, whether it sleeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.platform.refused_calls import UnsupportedCallError
from vllm_gaudi_ucm.platform.reload import refuse_reload, refuse_sleep
from vllm_gaudi_ucm.runner.resting_steps import RestingSteps
from vllm_gaudi_ucm.vllm_api.worker import model_loading, raised_by_last

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from vllm.config import CacheConfig, VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig
    from vllm_gaudi_ucm.device import Device
    from vllm_gaudi_ucm.distributed.ranks import Ranks
    from vllm_gaudi_ucm.lora.adapter_manager import AdapterManager
    from vllm_gaudi_ucm.runner.step_runner import StepRunner
    from vllm_gaudi_ucm.start.model_runner import ModelRunner
    from vllm_gaudi_ucm.vllm_api.loading import Weights
    from vllm_gaudi_ucm.vllm_api.lora import LoRARequest

logger = plugin_logger(__name__)


class ModelCalls:
    """These calls of a worker. See WorkerBase for the contract of each."""

    vllm_config: VllmConfig
    cache_config: CacheConfig
    model_runner: ModelRunner
    _ucm: UcmConfig
    _device: Device
    _ranks: Ranks
    _turn: AbstractContextManager[Any]
    _steps: StepRunner | RestingSteps

    def _take_parts(self) -> None:
        parts = self.model_runner.parts
        self._steps = parts.steps
        if parts.ahead is not None:
            self._turn = parts.ahead.lock

    @raised_by_last(UnsupportedFeatureError)
    def reload_weights(
        self,
        weights_iterator: Weights | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Serves other weights from the next step on; see docs/reference/worker.md."""
        refuse_reload(
            self.vllm_config,
            self._ucm,
            self._device.kind,
            is_checkpoint_format=is_checkpoint_format,
            is_asleep=isinstance(self._steps, RestingSteps),
        )
        with self._turn, model_loading(self.vllm_config):
            self.model_runner.reload_weights(weights_path, weights_iterator)
            if not isinstance(self._steps, RestingSteps):
                self._take_parts()
        if self.cache_config.enable_prefix_caching:
            logger.warning("The prefix cache has keys and values of the weights before: call reset_prefix_cache.")

    def _with_adapters(self, call: str, act: Callable[[AdapterManager], bool]) -> bool:
        found = self.model_runner.adapters
        if found is None:
            raise UnsupportedCallError(call, "adapters (LoRA), which are off", "start the engine with --enable-lora")
        with self._turn, torch.inference_mode():
            return act(found)

    @raised_by_last(Exception, otherwise=False)
    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter, and gives it a slot. Raises ValueError for one that does not fit the model."""
        return self._with_adapters("add_lora", lambda adapters: adapters.load(lora_request))

    @raised_by_last(Exception, otherwise=False)
    def remove_lora(self, lora_id: int) -> bool:
        return self._with_adapters("remove_lora", lambda adapters: adapters.remove_adapter(lora_id))

    @raised_by_last(Exception, otherwise=False)
    def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter in host memory and in a slot."""
        return self._with_adapters("pin_lora", lambda adapters: adapters.pin_adapter(lora_id))

    def list_loras(self) -> set[int]:
        """Returns the numbers of the adapters in host memory."""
        found = self.model_runner.adapters
        return set() if found is None else found.list_adapters()

    @raised_by_last(UnsupportedFeatureError)
    def sleep(self, level: int = 1) -> None:
        """Gives back the KV cache and graphs; at level 2 the weights, too."""
        refuse_sleep(self.vllm_config, self._ucm, self._device.kind)
        if not isinstance(self._steps, RestingSteps):
            with self._turn:
                # lets go of the objects of steps before their memory is given back
                self._steps = RestingSteps(self.model_runner.settle("sleep").requests)
                self.model_runner.sleep(drops_weights=level > 1)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Makes KV cache and graphs anew, and the weights if they were dropped, unless `tags` leave out `kv_cache`."""
        if isinstance(self._steps, RestingSteps) and (tags is None or "kv_cache" in tags):
            with self._turn, model_loading(self.vllm_config):
                self.model_runner.wake_up()
                self._take_parts()
