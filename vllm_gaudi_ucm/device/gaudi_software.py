"""Releases of Gaudi's software that this plugin knows, and the torch that each ships."""

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from vllm_gaudi_ucm.vllm_api.versions import installed_version

BRIDGE = "habana-torch-plugin"
"""The distribution whose version is the build of Gaudi's software: release and build number, four numbers."""

RELEASES = {"1.24.1": "2.11", "1.24.2": "2.13"}
"""Release -> the minor version of torch that it ships. The code path of both runs on the simulated card."""


@dataclass(frozen=True)
class GaudiSoftware:
    """The installed software: the build of Gaudi's software, and torch's version (None: no torch)."""

    build: str
    torch: str | None

    @property
    def release(self) -> str:
        """The first three numbers of the build, by which the vendor calls its software."""
        return ".".join(self.build.split(".")[:3])

    @property
    def expected_torch(self) -> str | None:
        """The minor version of torch that the release ships; None for a release that this plugin does not know."""
        return RELEASES.get(self.release)

    @property
    def has_its_torch(self) -> bool:
        """True if torch is the one that the release ships, by its minor version."""
        return self.expected_torch is not None and minor_version(self.torch) == self.expected_torch

    def __str__(self) -> str:
        return f"{self.build}, torch {self.torch or 'not installed'}"


def installed_gaudi_software() -> GaudiSoftware | None:
    """The software of this environment, None if there is none. Imports neither the bridge nor torch."""
    build = installed_version(BRIDGE)
    return None if build is None else GaudiSoftware(build, installed_version("torch"))


def minor_version(version: str | None) -> str | None:
    """Returns the first two numbers of a version, for any build (`2.13.0a0+git...` gives `2.13`)."""
    try:
        return None if version is None else ".".join(map(str, Version(version).release[:2]))
    except InvalidVersion:
        return None
