"""vLLM platform plugin for Intel Gaudi: Unified Attention and UCM's sparse methods, with a CPU and CUDA reference path."""

__version__ = "0.1.0"


def register() -> str | None:
    """Entry point `vllm.platform_plugins`: the platform class's dotted name, or None to stay out of the way."""
    from vllm_gaudi_ucm.device.detect import detect_device

    return "vllm_gaudi_ucm.platform.UcmPlatform" if detect_device() is not None else None
