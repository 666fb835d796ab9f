"""Layers of vLLM that this plugin computes in fewer operations on a CPU, through vLLM's registry of such layers."""


def register_cpu_layers() -> None:
    """Models loaded afterwards in this process are built with our layers. Safe to call more than once.

    A decode step of a small model is some two thousand operations of a few microseconds; these layers are a quarter of
    them. Every one falls back to vLLM's own computation for what it does not cover.
    """
    from vllm_gaudi_ucm.layers import rms_norm, rotary_embedding

    for module in (rms_norm, rotary_embedding):
        module.register()
