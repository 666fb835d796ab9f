"""Calls to a running worker that this plugin refuses by name, one row each (`REFUSED`)."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError
from vllm_gaudi_ucm.vllm_api.worker import raised_by_last


class UnsupportedCallError(UnsupportedFeatureError):
    """Raised for a call to a worker for a feature that this plugin lacks; the engine continues."""

    def __init__(self, call: str, feature: str, instead: str) -> None:
        NotImplementedError.__init__(
            self,
            f"vllm-gaudi-ucm does not support {feature} (asked for by the call {call}); {instead}. "
            "docs/support.md lists what is supported.",
        )
        self.feature = feature


class Refusal(NamedTuple):
    """The purpose of a call, and what to do instead."""

    feature: str
    instead: str


# Weights are packed when they are loaded.
_WEIGHTS = Refusal("weights that another process sends", "write a checkpoint, and call reload_weights with its path")
_DISCARD = Refusal("giving back the KV cache alone", "take sleep(1), which keeps the weights")
_CHECKPOINT = Refusal("checkpoints of a running engine", "start another engine")
_EXPERTS = Refusal("elastic expert parallelism", "start the engine again with the new size")
_SAVE = Refusal("saving weights, which are packed", "copy the model's own files")

REFUSED: dict[str, Refusal] = {
    "discard": _DISCARD,
    "checkpoint_prepare": _CHECKPOINT,
    "checkpoint_restore": _CHECKPOINT,
    "reset_weights": _WEIGHTS,
    "update_weights": _WEIGHTS,
    "start_weight_update": _WEIGHTS,
    "start_draft_weight_update": _WEIGHTS,
    "finish_weight_update": _WEIGHTS,
    "init_weight_transfer_engine": _WEIGHTS,
    "shutdown_weight_transfer_engine": _WEIGHTS,
    "compute_weight_checksums": Refusal("checksums of weights, which are packed", "take those of the model's files"),
    "save_sharded_state": _SAVE,
    "save_tensorized_model": _SAVE,
    "update_config": Refusal("a configuration that changes while it serves", "start the engine again with the new one"),
    "elastic_ep_execute": _EXPERTS,
    "reinitialize_distributed": _EXPERTS,
    "get_simple_cpu_offload_num_cpu_blocks": Refusal(
        "the KV connector SimpleCPUOffloadConnector", "take OffloadingConnector or UcmConnector"
    ),
    "handle_ft_command": Refusal("vLLM's fault tolerance", "start the engine again"),
}


def _refusal(call: str, refused: Refusal) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedCallError(call, *refused)

    refuse.__name__ = call
    refuse.__doc__ = f"Refused: {refused.feature}."
    return raised_by_last(UnsupportedFeatureError)(refuse)


class RefusedCalls:
    """A method for every call of `REFUSED`. As the first base class of a worker it overrides vLLM's own."""


for _call, _refused in REFUSED.items():
    setattr(RefusedCalls, _call, _refusal(_call, _refused))
