"""Doctor's section on versions: Python, vLLM, torch and what they need, against the supported windows."""

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_gaudi_ucm.cli.doctor.check import Check
from vllm_gaudi_ucm.vllm_api.compat import WINDOWS, Window, installed_version

SECTION = "versions"
DISTRIBUTION = "vllm-gaudi-ucm"


def version_checks() -> Iterator[Check]:
    """The section's rows."""
    yield Check(SECTION, DISTRIBUTION, "info", installed_version(DISTRIBUTION) or "not installed as a distribution")
    yield _python()
    for window in WINDOWS:
        yield _windowed(window)
    yield _transformers()
    yield Check(SECTION, "triton", "info", installed_version("triton") or "not installed (optional)")


def _python() -> Check:
    found = platform.python_version()
    expected = metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    if SpecifierSet(expected).contains(found, prereleases=True):
        return Check(SECTION, "Python", "ok", found, expected)
    return Check(SECTION, "Python", "fail", found, expected, "make the environment with a supported Python")


def _windowed(window: Window) -> Check:
    found = installed_version(window.distribution)
    if found is None:
        advice = f"install {window.distribution}; the README says which build"
        return Check(SECTION, window.distribution, "fail", "not installed", window.versions, advice)
    if window.holds(found):
        return Check(SECTION, window.distribution, "ok", found, window.versions)
    advice = f"install a supported {window.distribution}, or a release of {DISTRIBUTION} that supports {found}"
    return Check(SECTION, window.distribution, "fail", found, window.versions, advice)


def _transformers() -> Check:
    """The window of transformers is vLLM's, so it is read from vLLM's own requirements."""
    found = installed_version("transformers")
    expected = _required_by_vllm("transformers")
    if found is None:
        return Check(SECTION, "transformers", "fail", "not installed", str(expected), "pip install transformers")
    if expected.contains(found, prereleases=True):
        return Check(SECTION, "transformers", "ok", found, str(expected))
    advice = f"pip install 'transformers{expected}': vLLM asks for it"
    return Check(SECTION, "transformers", "warn", found, str(expected), advice)


def _required_by_vllm(distribution: str) -> SpecifierSet:
    try:
        requirements = metadata.requires("vllm") or []
    except metadata.PackageNotFoundError:
        return SpecifierSet()  # that vLLM is missing has a row of its own
    parsed = (Requirement(text) for text in requirements)
    return next((item.specifier for item in parsed if item.name == distribution), SpecifierSet())
