"""The folder of compiled recipes: what lies there is run, so nobody but its owner may write to it. covers: D6."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor.runtime import cache_dir_utils

from vllm_gaudi_ucm.decisions import recipe_cache
from vllm_gaudi_ucm.decisions.recipe_cache import RecipeCacheError, open_recipe_cache

VARIABLES = {"hpu": "PT_HPU_RECIPE_CACHE_CONFIG", "cpu": "TORCHINDUCTOR_CACHE_DIR"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And what is set meanwhile goes again."""
    for name in VARIABLES.values():
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = os.umask(0)
    yield
    os.umask(before)


def start(folder: Path | None, kind: str) -> None:
    device: Any = SimpleNamespace(kind=kind)
    open_recipe_cache(folder, device, "compile")


@pytest.mark.parametrize("kind", VARIABLES)
def test_a_new_folder_is_private_whatever_the_umask(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "recipes"
    start(folder, kind)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    assert os.environ[VARIABLES[kind]].split(",")[0] == str(folder)


@pytest.mark.parametrize("kind", VARIABLES)
def test_a_folder_that_others_may_write_to_is_refused(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RecipeCacheError, match=rf"ucm.graphs.recipe_cache: .*{folder}: it has mode 0777.*chmod go-w"):
        start(folder, kind)
    assert VARIABLES[kind] not in os.environ


@pytest.mark.parametrize("kind", VARIABLES)
def test_the_folder_of_a_variable_is_the_one_that_is_looked_at(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wins over the option."""
    (tmp_path / "theirs").mkdir(0o777)
    value = f"{tmp_path / 'theirs'}" + (",False,100" if kind == "hpu" else "")
    monkeypatch.setenv(VARIABLES[kind], value)
    for folder in (None, tmp_path / "ours"):
        with pytest.raises(RecipeCacheError, match=rf"variable {VARIABLES[kind]}: .*theirs: it has mode 0777"):
            start(folder, kind)
    (tmp_path / "theirs").chmod(0o755)
    start(tmp_path / "ours", kind)
    assert os.environ[VARIABLES[kind]] == value
    assert not (tmp_path / "ours").exists()


def test_the_folder_that_inductor_takes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Everybody knows its name in the temporary folder, and may be there first: then another one is used."""
    folder = tmp_path / "torchinductor_us"
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    start(None, "cpu")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert VARIABLES["cpu"] not in os.environ
    folder.chmod(0o777)
    monkeypatch.setattr(recipe_cache.logger, "handlers", [caplog.handler])
    with caplog.at_level(logging.WARNING, recipe_cache.logger.name):
        start(None, "cpu")
    assert f"{folder}: it has mode 0777" in caplog.text
    own = tmp_path / "cache" / "vllm-gaudi-ucm" / "inductor"
    assert os.environ[VARIABLES["cpu"]] == str(own)
    assert own.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv(VARIABLES["cpu"])
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    with pytest.raises(RecipeCacheError, match=r"recipe_cache: not set, and .*XDG_CACHE_HOME: found 'here'"):
        start(None, "cpu")


def test_where_nothing_is_compiled_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", lambda: pytest.fail("asked for"))
    device: Any = SimpleNamespace(kind="cpu")
    open_recipe_cache(None, device, "off")
    start(None, "hpu")
