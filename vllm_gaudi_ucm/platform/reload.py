"""Refuses `reload_weights` and `sleep` for engines whose features exclude them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_gaudi_ucm.connector.transfer_config import has_connector
from vllm_gaudi_ucm.platform.refused_calls import UnsupportedCallError
from vllm_gaudi_ucm.vllm_api.platforms import is_pooling, keeps_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.config.ucm_config import UcmConfig

# Until tests/engine/test_sleep.py, which tries it on every device, has passed on a GPU. On an H200 tokens were the same
# after sleep, but an engine with 200 MiB of keys and values gave back 140.
SLEPT_ON_A_GPU = False

_INSTEAD = "start the engine again with the new weights"
_AWAKE = "end the engine to free its memory; `wake_up` lets a paused one go on"


def refuse_reload(
    vllm_config: VllmConfig, config: UcmConfig, device_kind: str, *, is_checkpoint_format: bool, is_asleep: bool
) -> None:
    """Raises UnsupportedCallError if this engine cannot take other weights. is_asleep: whether `sleep` was called."""
    if not is_checkpoint_format:
        raise UnsupportedCallError(
            "reload_weights", "weights that are not in a checkpoint's format", "pass the tensors of a checkpoint"
        )
    found = next(_excluded(vllm_config, config, device_kind), None)
    _refuse("reload_weights", "other weights", _INSTEAD, found)
    # an engine that sleeps has no states, and makes new ones when it wakes up
    if keeps_states(vllm_config) and not is_asleep:
        lost = "layers that keep a state, whose states of running requests would be lost"
        _refuse("reload_weights", "other weights", "call sleep before it, and wake_up after it", lost)


def refuse_sleep(vllm_config: VllmConfig, config: UcmConfig, device_kind: str) -> None:
    """Raises UnsupportedCallError if this engine cannot give back its memory."""
    found = next(_excluded(vllm_config, config, device_kind), None)
    if device_kind == "cuda" and not SLEPT_ON_A_GPU:
        found = "a GPU, whose memory it does not give back as a whole"
    _refuse("sleep", "sleep mode above level 0", _AWAKE, found)


def _refuse(call: str, feature: str, instead: str, found: str | None) -> None:
    if found is not None:
        raise UnsupportedCallError(call, f"{feature} with {found}", instead)


def _excluded(vllm_config: VllmConfig, config: UcmConfig, device_kind: str) -> Iterator[str]:
    if device_kind == "hpu":
        yield "a Gaudi, whose recipes have the addresses of weights"
    if vllm_config.parallel_config.world_size_across_dp > 1:
        yield "several workers"
    if vllm_config.lora_config is not None:
        yield "adapters (LoRA), which would be lost"
    if is_pooling(vllm_config):
        yield "a model that pools, with which it has not been tried"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding, whose drafts of the next step would be lost"
    if has_connector(vllm_config):
        yield "a KV connector, whose blocks are named after the weights"
    if config.ucm_sparse_method is not None:
        yield "ucm.ucm_sparse_method, whose summaries of blocks would be lost"
    if config.memory_mode.enabled:
        yield "ucm.memory_mode, whose blocks on the host would be lost"
    if config.preemption.swaps:
        yield "ucm.preemption.mode swap or auto, whose swapped blocks would be lost"
