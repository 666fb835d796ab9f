"""Everything that depends on the version of vLLM or torch: each entry names its reason and when to remove it."""

import logging
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

logger = logging.getLogger(__name__)


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
