"""Everything that depends on the version of vLLM or torch: each entry names its reason and when to remove it."""

import atexit
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_gaudi_ucm.envs import wait_for_engines_end
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.vllm_api.parent_watch import is_engine_process

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from vllm.config import VllmConfig
    from vllm.config.model import LogprobsMode
    from vllm.v1.sample.sampler import Sampler

logger = plugin_logger(__name__)


class UnsupportedVersionError(RuntimeError):
    """An installed package is missing or outside the versions this plugin was tested with."""


@dataclass(frozen=True)
class Window:
    """The versions of one distribution that this plugin supports."""

    distribution: str
    versions: str
    # Gaudi's own builds call themselves pre-releases (2.11.0a0+git...) although they are the release.
    prereleases_count: bool = False

    def holds(self, version: str) -> bool:
        """Whether a version is inside; a local suffix (`+cpu`, `+empty`) says how it was built and never matters."""
        parsed = Version(version)
        compared = parsed.base_version if self.prereleases_count else parsed.public
        return SpecifierSet(self.versions).contains(compared, prereleases=True)


SUPPORTED_VLLM = ">=0.32.0,<0.33"
"""The vLLM releases whose scheduler/worker contract the runner was written against.

Reason: `SchedulerOutput`, `ModelRunnerOutput` and `WorkerBase` change between minor releases without notice.
Remove when: vLLM declares that contract stable; until then the window moves with each release that passes the tests.
"""

SUPPORTED_TORCH = ">=2.11,<2.14"
"""The torch releases that were seen to run: Gaudi software 1.24 ships 2.11, vLLM 0.32 is built for 2.13.

Reason: graph capture and `torch.compile` differ below and above.
Remove when: Gaudi software ships the torch that the supported vLLM asks for; then vLLM's own requirement is enough.
"""

WINDOWS = (Window("vllm", SUPPORTED_VLLM), Window("torch", SUPPORTED_TORCH, prereleases_count=True))


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution (from its metadata: nothing is imported), None where it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def version_problem(window: Window) -> str | None:
    """What is wrong with the installed version of one distribution, None if nothing is."""
    found = installed_version(window.distribution)
    if found is None:
        return f"{window.distribution} is not installed, expected {window.versions}"
    if not window.holds(found):
        return f"{window.distribution} {found} is installed, expected {window.versions}"
    return None


def check_versions() -> None:
    """Raises one error that names every package outside its window. There is deliberately no way around it.

    Reason: outside the window steps would run against another contract and give wrong tokens rather than an error.
    Remove when: both windows above are gone.
    """
    problems = [problem for window in WINDOWS if (problem := version_problem(window)) is not None]
    if problems:
        raise UnsupportedVersionError(
            f"vllm-gaudi-ucm {installed_version('vllm-gaudi-ucm') or ''} cannot run here: {'; '.join(problems)}. "
            "Install a supported version, or a release of vllm-gaudi-ucm that supports yours."
        )


def vllm_own_platforms() -> list[str]:
    """Names of vLLM's built-in platforms that would be active here (`cuda`, `cpu`, ...), usually none or one.

    Reason: vLLM has no question "which platform without this plugin?"; asking its built-in plugins one by one is what
    it does itself, and agrees with it by construction. It never touches `current_platform`, so it may be called from
    `register()`, while vLLM is resolving that very attribute.
    Remove when: `vllm.platforms` offers such a question.
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


def model_loading(vllm_config: "VllmConfig") -> "AbstractContextManager[None]":
    """The context in which a worker loads its model.

    Reason: `WorkerWrapperBase` sets the current configuration around `init_device` and `initialize_from_config`, but
    not around `load_model`, where the layers of a model read it.
    Remove when: `WorkerWrapperBase.load_model` exists and sets it.
    """
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(vllm_config)


def tolerate_missing_accelerator() -> None:
    """Makes torch's calls for "the accelerator" do nothing in a process with an engine whose torch has none.

    Reason: on a CPU-only torch these calls raise, and vLLM makes them wherever its platform is not its own CPU
    platform: when a model is loaded (`BaseModelLoader.load_model`) and when an engine ends
    (`cleanup_dist_env_and_memory`), which users call in their own process, too. vLLM's own CPU worker replaces the same
    calls. A user's process comes here when it checks an engine's configuration, a worker before it loads the model;
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


# More than stores may take to keep what is on its way (5 s) and to end their threads (as long again), on a machine that
# does something else, too; less than the 30 s after which Kubernetes kills. It passes only where the engine needs it.
SHUTDOWN_SECONDS = 20


class ShutdownGrace(int):
    """A number of seconds that we chose, and not the user; an attribute would not survive the way to the engine."""


def give_engine_time_to_stop(vllm_config: "VllmConfig") -> None:
    """Lets the engine process end by itself when the server is stopped, where the user asked for no time-out.

    Reason: with `--shutdown-timeout 0`, the default, the server kills the engine process right after it has asked it to
    stop: open streams are never ended, so the server waits for them for ever, and the worker cannot write its summary.
    vLLM's XPU platform raises the same number; offline (`LLM`) it is another, in the environment. The engine itself
    must still abort its requests at once instead of finishing them: `abort_at_shutdown` gives it its 0 back.
    Remove when: the server waits for the engine to abort its requests.
    """
    chosen = vllm_config.shutdown_timeout
    if chosen == 0 and not isinstance(chosen, ShutdownGrace):
        vllm_config.shutdown_timeout = ShutdownGrace(SHUTDOWN_SECONDS)
    wait_for_engines_end(SHUTDOWN_SECONDS)


def abort_at_shutdown(vllm_config: "VllmConfig") -> None:
    """The engine process's half of `give_engine_time_to_stop`; same reason, removed with it.

    The 0 is marked as ours too: the engine checks its configuration once more after its worker has started.
    """
    if isinstance(vllm_config.shutdown_timeout, ShutdownGrace):
        vllm_config.shutdown_timeout = ShutdownGrace(0)


def leave_heap_to_the_system(is_closed: Callable[[], bool]) -> None:
    """An engine's process ends like a forked one, without taking its heap apart; a user's own process stays as it is.

    is_closed: asked when everything else that is to be done at exit is done; False: after an error, whose status stays.

    Reason: the engine thaws its heap when it ends, and Python takes 700,000 objects apart one by one: 3 to 5 s on a
    machine that does something else, too, in which the server lost patience and killed it. vLLM leaves it frozen on
    ROCm, which has nanobind (of Triton) complain of every type.
    Remove when: `EngineCoreProc.run_engine_core` ends so on every platform.
    """
    if is_engine_process():
        atexit.register(lambda: os._exit(0) if is_closed() else None)


def raise_if_nan_logits(counts: Mapping[str, int]) -> None:
    """vLLM's own reaction to NaN logits where `VLLM_RAISE_ON_LOGIT_NANS` asks for it: request id -> number of NaNs.

    Reason: it stands in a module of the GPU worker (`vllm.v1.worker.utils`) that is internal and moves.
    Remove when: vLLM checks the counts of `ModelRunnerOutput.num_nans_in_logits` itself.
    """
    from vllm.v1.worker.utils import raise_if_nan_logits as vllm_raise

    vllm_raise(counts)


def client_error(message: str) -> Exception:
    """An error for which the server answers a request with status 400.

    Reason: vLLM 0.32 tells a client's mistakes from its own by a class of exceptions, and answers 500 to a ValueError.
    Remove when: every supported release has that class; then it is imported where it is raised.
    """
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message)


def top_k_top_p(logits: "torch.Tensor", top_k: "torch.Tensor", top_p: "torch.Tensor") -> "torch.Tensor":
    """vLLM's top-k and top-p masks as plain torch, in place, at shapes that depend on the logits' alone.

    Reason: vLLM's own choice (`apply_top_k_top_p`) takes Triton wherever that is installed, whatever the device.
    Remove when: vLLM chooses by the device of the logits.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, top_k, top_p)


def host_sampler(logprobs_mode: "LogprobsMode", use_fp64_gumbel: bool) -> "Sampler":
    """vLLM's sampler for logits on the CPU of a machine whose device is another.

    Reason: as for `top_k_top_p`; Triton cannot read the CPU's memory.
    Remove when: as for `top_k_top_p`.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler(logprobs_mode, use_fp64_gumbel)
    choose = sampler.topk_topp_sampler

    def masked(
        logits: "torch.Tensor",
        generators: "dict[int, torch.Generator]",
        k: "torch.Tensor | None",
        p: "torch.Tensor | None",
    ) -> "tuple[torch.Tensor, torch.Tensor | None]":
        logits = apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
        return choose.forward_native(logits, generators, None, None)

    # the instance's attribute is where vLLM itself puts its choice
    choose.forward = masked
    return sampler


def apply_penalties(
    logits: "torch.Tensor",
    prompt_token_ids: "torch.Tensor",
    output_token_ids: "torch.Tensor",
    presence: "torch.Tensor",
    frequency: "torch.Tensor",
    repetition: "torch.Tensor",
) -> "torch.Tensor":
    """vLLM's penalties as plain torch, out of place.

    Args:
        logits: float32 [rows, vocabulary].
        prompt_token_ids, output_token_ids: int64 [rows, width], padded with the vocabulary's size.
        presence, frequency, repetition: float32 [rows].

    Reason: `vllm.model_executor.layers.utils.apply_penalties` calls an operator of vLLM's CUDA library for logits on
    CUDA, which the build without a device does not have.
    Remove when: it asks whether that library is there.
    """
    from vllm._custom_ops import apply_repetition_penalties_torch
    from vllm.model_executor.layers.utils import get_token_bin_counts_and_mask

    rows, vocab_size = logits.shape
    _, in_prompt = get_token_bin_counts_and_mask(prompt_token_ids, vocab_size, rows)
    counts, in_output = get_token_bin_counts_and_mask(output_token_ids, vocab_size, rows)
    logits = logits.clone()
    apply_repetition_penalties_torch(logits, in_prompt, in_output, repetition)
    logits -= frequency.unsqueeze(1) * counts
    logits -= presence.unsqueeze(1) * in_output
    return logits


def propose_ngram(
    token_ids: "NDArray[np.int32]", min_n: int, max_n: int, max_model_len: int, num_drafts: int
) -> "NDArray[np.int32]":
    """vLLM's n-gram search in one request, compiled by numba at its first call.

    Args:
        token_ids: [tokens] of the request.
        min_n, max_n: lengths of the n-grams.
        max_model_len: tokens of the longest request.
        num_drafts: most drafts.

    Returns:
        [at most num_drafts].

    Raises:
        ImportError: numba is not installed.

    Reason: `NgramProposer.propose` wants a copy of all token ids in batch order, has buffers for `max_num_seqs` rows
    only, which a table with preempted requests exceeds, and starts numba's threads, which take the cores of a model on
    the CPU, for a loop that vLLM itself runs on one.
    Remove when: it takes rows of a table, and starts none.
    """
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as search

    return search(token_ids, min_n, max_n, max_model_len, num_drafts)
