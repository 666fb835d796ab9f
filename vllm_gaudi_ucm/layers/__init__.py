"""Layers of vLLM that this plugin computes in fewer operations on a CPU, through vLLM's registry of such layers."""

import threading

from vllm_gaudi_ucm.logger import plugin_logger

logger = plugin_logger(__name__)


def register_cpu_layers() -> None:
    """Models loaded afterwards in this process are built with our layers. Safe to call more than once.

    A decode step of a small model is some two thousand operations of a few microseconds; these layers are a quarter of
    them. Every one falls back to torch's or vLLM's own computation for what it does not cover.
    """
    from vllm_gaudi_ucm.layers import rms_norm, rotary_embedding, silu_and_mul
    from vllm_gaudi_ucm.ops.host_memory.api import keep_freed_memory

    keep_freed_memory()
    # a first start on a machine builds the kernels, in the seconds in which the model is loaded
    threading.Thread(target=_load_kernels, name="native-kernels", daemon=True).start()
    for module in (rms_norm, rotary_embedding, silu_and_mul):
        module.register()


def _load_kernels() -> None:
    from vllm_gaudi_ucm.ops.native.library import native, why_not_native

    if native() is None:
        logger.warning("Native CPU kernels are missing, torch's operations are used and slower: %s", why_not_native())
