"""What `vllm.platforms`, the extension point of platform plugins, leaves open.

Imports vLLM inside functions only: our platform class is loaded while vLLM is being imported.
"""

from vllm_gaudi_ucm.logger import plugin_logger

logger = plugin_logger(__name__)


def vllm_own_platforms() -> list[str]:
    """Names of vLLM's built-in platforms that would be active here (`cuda`, `cpu`, ...), usually none or one.

    Never touches `current_platform`, so that `register()` may call it while vLLM resolves that very attribute.

    Reason: vLLM cannot say which platform it would take without this plugin. It asks its built-in plugins one by one,
    and so does this function.
    Remove when: `vllm.platforms` has a function for it.
    """
    from vllm.platforms import builtin_platform_plugins

    active = []
    for name, plugin in builtin_platform_plugins.items():
        try:
            if plugin() is not None:
                active.append(name)
        except Exception:
            # vLLM takes a built-in plugin that raises for inactive; deciding otherwise would disagree with it.
            logger.debug("vLLM's built-in platform %s failed during detection", name, exc_info=True)
    return active


def tolerate_missing_accelerator() -> None:
    """Makes `torch.accelerator`'s calls do nothing in a process whose torch has no accelerator.

    Reason: on a CPU-only torch these calls raise, and vLLM makes them wherever its platform is not its own CPU
    platform: when a model is loaded (`BaseModelLoader.load_model`) and when an engine ends
    (`cleanup_dist_env_and_memory`), which users call in their own process, too. vLLM's own CPU worker replaces the same
    calls. A user's process calls this when it checks an engine's configuration, a worker before it loads the model;
    importing the plugin changes nothing.
    Remove when: both places ask `torch.accelerator.is_available()` first.
    """
    import torch

    if torch.accelerator.is_available():
        return
    for name in ("empty_cache", "empty_host_cache", "synchronize"):
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, _nothing_to_do)


def _nothing_to_do(*args: object, **kwargs: object) -> None:
    """There is no accelerator."""


def client_error(message: str) -> Exception:
    """An error that the server answers with status 400.

    Reason: vLLM tells a client's mistakes from its own by a class of exceptions, which is internal, and answers 500 to
    a ValueError.
    Remove when: `Platform.validate_request` may raise ValueError.
    """
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message)
