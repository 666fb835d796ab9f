"""vLLM platform plugin for Intel Gaudi: Unified Attention and UCM's sparse methods, with a CPU and CUDA reference."""

from typing import TYPE_CHECKING

__version__: str

PLATFORM_CLASS = "vllm_gaudi_ucm.platform.platform.UcmPlatform"

if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        """`__version__`, read from the installed distribution, whose build reads it from git's tags, when it is asked
        for."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version("vllm-gaudi-ucm")


def register() -> str | None:
    """The entry point `vllm.platform_plugins`: returns the platform class's dotted name, or None to stay inactive.

    vLLM swallows its exceptions and continues without the plugin; `gaudi-ucm doctor` shows it.
    """
    from vllm_gaudi_ucm.device.detect import detect_device
    from vllm_gaudi_ucm.vllm_api.engine_process import watch_parent
    from vllm_gaudi_ucm.vllm_api.log_lines import leave_out_untrue_lines

    # first, because the server may be gone before the engine makes a worker
    watch_parent()
    if detect_device() is None:
        return None
    leave_out_untrue_lines()
    return PLATFORM_CLASS
