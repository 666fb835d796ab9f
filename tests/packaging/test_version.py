"""The version comes from git's tags when a distribution is built, and the notes of a release from the changelog."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_gaudi_ucm
from tests.packaging.source_tree import ROOT

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
CHANGELOG = """# Changelog

## Unreleased

### Added

- Not out yet.

## 0.2.0 (2026-12-01)

### Fixed

- One thing.
- [A guide](docs/guide.md#part) beside [a page](https://example.org/page).

## 0.1.0

"""


def git(folder: Path, *arguments: str) -> None:
    subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def built_version(folder: Path) -> str:
    """What a build in this folder would call it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SETUPTOOLS_SCM_")}
    command = [sys.executable, "-m", "setuptools_scm", "--root", ".", "--config", "pyproject.toml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the project's configuration, one commit and no tags."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "First")
    return tmp_path


def test_a_tag_is_the_version(clone: Path) -> None:
    git(clone, "tag", "v0.2.0")
    assert built_version(clone) == "0.2.0"
    (clone / "pyproject.toml").open("a").write("# changed\n")
    git(clone, "commit", "--quiet", "--all", "--message", "Second")
    assert built_version(clone).startswith("0.2.1.dev1+g")


def test_a_clone_without_tags_has_a_version(clone: Path) -> None:
    assert built_version(clone).startswith("0.0.1.dev1+unknown.g")


def test_without_git_the_version_says_that_it_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert built_version(tmp_path) == "0.0.0+unknown"


def test_the_package_has_no_other_late_attributes() -> None:
    assert vllm_gaudi_ucm.__version__
    with pytest.raises(AttributeError, match="has no attribute 'versions'"):
        _ = vllm_gaudi_ucm.versions  # type: ignore[attr-defined]


def notes(tmp_path: Path, version: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    script = str(ROOT / "scripts" / "release_notes.py")
    command = [sys.executable, script, version, "--changelog", "CHANGELOG.md", "--output", "dist/notes.md"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)


def test_notes_are_the_section_of_the_version(tmp_path: Path) -> None:
    done = notes(tmp_path, "0.2.0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "dist" / "notes.md").read_text() == (
        "### Fixed\n\n- One thing.\n- A guide (docs/guide.md) beside [a page](https://example.org/page).\n"
    )


@pytest.mark.parametrize(
    ("version", "found"), [("0.3.0", "found Unreleased, 0.2.0, 0.1.0"), ("0.1.0", "found an empty one")]
)
def test_a_missing_section_is_an_error_that_says_what_to_do(tmp_path: Path, version: str, found: str) -> None:
    done = notes(tmp_path, version)
    assert done.returncode == 1
    assert found in done.stderr
    assert f"expected a section '## {version}'" in done.stderr
    assert f"tag the commit v{version}" in done.stderr
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("version", ["0.2.1.dev1+g0123456", "0.2.0+d20261201"])
def test_what_has_no_tag_has_no_notes(tmp_path: Path, version: str) -> None:
    done = notes(tmp_path, version)
    assert done.returncode == 1
    assert f"found version {version}, expected that of a tag" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_a_release_of_a_commit_without_a_tag_ends_before_anything_is_built(clone: Path) -> None:
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    (clone / "CHANGELOG.md").write_text(CHANGELOG)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SETUPTOOLS_SCM_")}
    command = ["bash", "scripts/release.sh", sys.executable]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.startswith("[1/6]")
    assert "[2/6]" not in done.stdout
    assert "expected that of a tag" in done.stderr
    assert not (clone / "dist").exists()
