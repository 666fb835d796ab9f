"""The folder between worker and API server: found from both sides, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_gaudi_ucm.observability.folder import is_private, make_private, metrics_folder, remove_files


def test_data_parallel_engines_share_the_servers_folder() -> None:
    assert metrics_folder("123_dp7") == metrics_folder("123")
    assert metrics_folder("123") != metrics_folder("124")


def test_an_instance_id_never_leaves_the_temp_folder() -> None:
    assert metrics_folder("../../etc/x").parent == metrics_folder("123").parent


def test_made_for_this_user_alone_and_made_twice(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    make_private(folder)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file", "group", "others"])
def test_not_private(tmp_path: Path, kind: str) -> None:
    folder, other = tmp_path / "metrics", tmp_path / "other"
    other.mkdir(mode=0o700)
    if kind == "link":
        folder.symlink_to(other)
    elif kind == "file":
        folder.touch(0o600)
    else:
        folder.mkdir()
        folder.chmod(0o770 if kind == "group" else 0o707)
    assert not is_private(folder)
    with pytest.raises(PermissionError, match="TMPDIR"):
        make_private(folder)


def test_remove_leaves_what_is_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    make_private(folder)
    for name in ("counter_0.db", "counter_1.db", "gauge_mostrecent_1.db", "notes.txt"):
        (folder / name).touch()
    remove_files(folder, "1")
    assert {file.name for file in folder.iterdir()} == {"counter_0.db", "notes.txt"}
    remove_files(folder)
    assert {file.name for file in folder.iterdir()} == {"notes.txt"}
    (folder / "notes.txt").unlink()
    remove_files(folder)
    remove_files(folder)
    assert not folder.exists()
