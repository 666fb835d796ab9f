"""Versions of vLLM and torch that this plugin runs with. Imports nothing of either."""

from dataclasses import dataclass
from functools import cache
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_gaudi_ucm.logger import plugin_logger

logger = plugin_logger(__name__)


class UnsupportedVersionError(RuntimeError):
    """An installed package is missing or outside the versions this plugin was tested with."""


@dataclass(frozen=True)
class VersionWindow:
    """The versions of one distribution that this plugin supports."""

    distribution: str
    versions: str
    # Gaudi's own builds call themselves pre-releases (2.11.0a0+git...) although they are the release.
    prereleases_count: bool = False

    def holds(self, version: str) -> bool:
        """True if a version is inside; a local suffix (`+cpu`, `+empty`), which tells its build, does not count."""
        parsed = Version(version)
        compared = parsed.base_version if self.prereleases_count else parsed.public
        return SpecifierSet(self.versions).contains(compared, prereleases=True)


SUPPORTED_VLLM = ">=0.32.0,<0.34"
"""The vLLM releases whose scheduler/worker contract the runner was written against.

Reason: `SchedulerOutput`, `ModelRunnerOutput` and `WorkerBase` change between minor releases without notice.
Remove when: vLLM declares that contract stable; until then the window moves with each release that passes the tests.
"""

SUPPORTED_TORCH = ">=2.11,<2.15"
"""The torch releases that were tested: Gaudi software 1.24.1 ships 2.11 and 1.24.2 ships 2.13; vLLM 0.32 is built for
2.13, vLLM 0.33 for 2.14.

Reason: graph capture and `torch.compile` differ below and above.
Remove when: Gaudi software ships the torch that the supported vLLM asks for; then vLLM's own requirement is enough.
"""

BUILT_FOR_TORCH = {"0.32": "2.13", "0.33": "2.14"}
"""Maps the minor version of vLLM to the minor version of torch that its builds for CPUs and CUDA pin.

Reason: the empty-device build, which a Gaudi takes, asks for no torch, so that no metadata tells.
Remove when: the metadata of an empty-device build names the torch that vLLM is built for.
"""

WINDOWS = (VersionWindow("vllm", SUPPORTED_VLLM), VersionWindow("torch", SUPPORTED_TORCH, prereleases_count=True))


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is missing.

    Reason: it is read from metadata, because `vllm.__version__` would import vLLM.
    Remove when: as for `check_versions`.
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _problem(window: VersionWindow) -> str | None:
    """Returns the problem with the installed version of one distribution; None if there is none."""
    found = installed_version(window.distribution)
    if found is None:
        return f"{window.distribution} is not installed, expected {window.versions}"
    if not window.holds(found):
        return f"{window.distribution} {found} is installed, expected {window.versions}"
    return None


def check_versions(allow_untested_vllm: bool = False) -> None:
    """Raises UnsupportedVersionError that names every package outside its window.

    allow_untested_vllm: whether an installed vLLM outside its window is a warning, once in a process.

    Reason: outside the window steps may run against another contract, and give wrong tokens instead of an error.
    Remove when: both windows above are gone.
    """
    problems = {window.distribution: problem for window in WINDOWS if (problem := _problem(window)) is not None}
    untested = installed_version("vllm") is not None and "vllm" in problems
    if untested and allow_untested_vllm:
        _warn_once(problems.pop("vllm"))
    if problems:
        advice = "Install a supported version, or a release of vllm-gaudi-ucm that supports yours."
        if untested and not allow_untested_vllm:
            advice += " The option ucm.allow_untested_vllm true turns the refusal of an untested vLLM into a warning."
        ours, found = installed_version("vllm-gaudi-ucm") or "", "; ".join(problems.values())
        raise UnsupportedVersionError(f"vllm-gaudi-ucm {ours} cannot run here: {found}. {advice}")


@cache
def _warn_once(problem: str) -> None:
    logger.warning("%s: untested, started because of ucm.allow_untested_vllm; tokens may be wrong.", problem)
