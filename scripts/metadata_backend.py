"""Replaces a source distribution's build backend when pip needs only metadata: none of its code runs."""

from __future__ import annotations

import shutil
from email.parser import HeaderParser
from pathlib import Path


def get_requires_for_build_wheel(config_settings: dict[str, object] | None = None) -> list[str]:
    """Needs nothing (PEP 517)."""
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: dict[str, object] | None = None) -> str:
    """Writes the folder with METADATA, from the PKG-INFO of the archive, and returns its name (PEP 517)."""
    metadata = HeaderParser().parsestr(Path("PKG-INFO").read_text(encoding="utf-8"))
    folder = Path(metadata_directory) / f"{metadata['Name'].replace('-', '_')}-{metadata['Version']}.dist-info"
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return folder.name
