"""The folder between worker and API server: found from both sides, and nobody else's."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest

from vllm_gaudi_ucm.observability.folder import (
    LOCK,
    hold_private,
    make_private,
    metrics_folder,
    remove_files,
    remove_stale,
)
from vllm_gaudi_ucm.observability.step_metrics import StepMetrics
from vllm_gaudi_ucm.private_folder import is_private


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


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def hold_and_die(instance: str) -> None:
    """An engine that is killed."""
    StepMetrics.of_engine(instance, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_folders_of_killed_engines_go_when_another_starts(temp: Path) -> None:
    """Those of living ones stay, and what only looks like one."""
    dead = multiprocessing.get_context("fork").Process(target=hold_and_die, args=("dead",))
    dead.start()
    dead.join()
    assert list(metrics_folder("dead").glob("*.db"))
    living = StepMetrics.of_engine("living", 0)
    stranger = temp / "gaudi-ucm-metrics-stranger"
    stranger.mkdir(0o700)
    (stranger / "notes.txt").touch()
    other = StepMetrics.of_engine("other", 0)
    assert sorted(path.name for path in temp.iterdir()) == [
        metrics_folder(name).name for name in ("living", "other", "stranger")
    ]
    assert list(metrics_folder("living").glob("*.db"))
    for metrics in (living, other):
        metrics.close()
        metrics.close()
    assert list(temp.iterdir()) == [stranger]


def test_a_folder_that_goes_while_it_is_made_is_made_again(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its lock's opening and its holding another engine takes it for a dead one's."""
    folder = metrics_folder("123")
    holds = []

    def flock(lock: int, how: int) -> None:
        holds.append(how)
        if len(holds) == 1:
            (folder / LOCK).unlink()
            folder.rmdir()

    monkeypatch.setattr(fcntl, "flock", flock)
    os.close(hold_private(folder))
    assert len(holds) == 2
    assert (folder / LOCK).exists()


def test_a_link_for_a_lock_is_not_followed(temp: Path) -> None:
    folder, victim = metrics_folder("123"), temp / "victim"
    folder.mkdir(0o700)
    victim.touch()
    (folder / LOCK).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        hold_private(folder)
    remove_stale()
    assert victim.exists()
