"""Which tests `make test-changed` runs: those of what has changed, each with its reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts.changed_tests import Tree, choose, main
from tests.architecture.sources import ROOT

FILES = {
    "vllm_gaudi_ucm/__init__.py": "",
    "vllm_gaudi_ucm/batch/plan.py": "def plan(): ...\n",
    "vllm_gaudi_ucm/store/memory.py": "PLACE = 'vllm_gaudi_ucm.store.file:FileStore'\n",
    "vllm_gaudi_ucm/store/file.py": "class FileStore: ...\n",
    "ops/copy.py": "",
    "tools/vllm_gaudi_ucm_tools/traffic/mix.py": "def mix(): ...\n",
    "docs/guide.md": "text\n",
    "tests/batches.py": "from vllm_gaudi_ucm.batch.plan import plan\n",
    "tests/batch/test_plan.py": "def test_one(): ...\n",
    "tests/engine/test_phases.py": "def test_one(): ...\n",
    "tests/engine/test_serving.py": "from tests.batches import plan\n\ndef test_one(): ...\n",
    "tests/store/test_file.py": "def test_one():\n    from vllm_gaudi_ucm.store.file import FileStore\n",
    "tests/store/test_memory.py": "def test_one(): ...\n",
    "tests/ops/test_copy.py": "def test_one(): ...\n",
    "tests/graphs/test_mix.py": "from vllm_gaudi_ucm_tools.traffic.mix import mix\n\ndef test_one(): ...\n",
    "tests/traffic/test_steps.py": "def test_one(): ...\n",
    "tests/cli/test_pages.py": "PAGE = 'docs/guide.md'\n\ndef test_one(): ...\n",
    "tests/architecture/test_rooms.py": "def test_one(): ...\n",
}
SERVED = "tests/engine/test_phases.py"
RULES = "tests/architecture/test_rooms.py"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--initial-branch", "main")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--message", "first")
    return tmp_path


def chosen(repository: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert main(["--list", *arguments], repository) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    return dict(line.split(maxsplit=1) for line in lines)  # type: ignore[arg-type]


def test_nothing_has_changed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(repository, capsys) == {}


def test_tools_are_used_by_their_room_and_by_what_imports_them(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = "tools/vllm_gaudi_ucm_tools/traffic/mix.py"
    (repository / file).write_text("def mix(): return 1\n")
    found = chosen(repository, capsys)
    assert found == {
        "tests/graphs/test_mix.py": f"uses {file}",
        "tests/traffic/test_steps.py": f"is in the room of {file}",
        RULES: "reads the whole code",
    }


def test_code_is_used_by_its_room_and_by_what_imports_it(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "vllm_gaudi_ucm/batch/plan.py").write_text("def plan(): return 1\n")
    assert chosen(repository, capsys) == {
        "tests/engine/test_serving.py": "uses vllm_gaudi_ucm/batch/plan.py",
        "tests/batch/test_plan.py": "is in the room of vllm_gaudi_ucm/batch/plan.py",
        SERVED: "runs an engine",
        RULES: "reads the whole code",
    }


def test_a_commit_is_a_change_against_an_earlier_base(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "ops/copy.py").unlink()
    git(repository, "commit", "--all", "--message", "second")
    assert chosen(repository, capsys) == {}
    assert set(chosen(repository, capsys, "--base", "HEAD~1")) == {"tests/ops/test_copy.py", SERVED, RULES}


def test_a_new_test_and_a_helper(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "tests/batch/test_new.py").write_text("def test_one(): ...\n")
    (repository / "tests/batches.py").write_text("plan = None\n")
    assert chosen(repository, capsys) == {
        "tests/batch/test_new.py": "has changed",
        "tests/engine/test_serving.py": "uses tests/batches.py",
        RULES: "reads the whole code",
    }


def test_a_page_is_used_by_what_names_it(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "docs/guide.md").write_text("other text\n")
    assert chosen(repository, capsys) == {
        "tests/cli/test_pages.py": "uses docs/guide.md",
        RULES: "reads the whole code",
    }


@pytest.mark.slow
def test_changed_tests_run_with_slow_ones(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slow = "import pytest\n\n@pytest.mark.slow\ndef test_slow():\n    assert not 'run'\n"
    (repository / "tests/store/test_memory.py").write_text(slow)
    options = ["--", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(repository)]
    assert main(options, repository) == 1
    assert "FAILED tests/store/test_memory.py::test_slow" in capfd.readouterr().out


@pytest.mark.slow
def test_slow_tests_of_other_files_are_left_out(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    slow = "import pytest\n\n@pytest.mark.slow\ndef test_slow():\n    assert not 'run'\n"
    (repository / "tests/store/test_memory.py").write_text(slow)
    git(repository, "commit", "--all", "--message", "second")
    (repository / "vllm_gaudi_ucm/store/memory.py").write_text("")
    options = ["--", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(repository)]
    assert main(options, repository) == 0
    assert main(["--slow", *options], repository) == 1
    assert "tests/store/test_memory.py::test_slow" in capfd.readouterr().out


def test_an_unknown_base(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--base", "nowhere"], repository) == 2
    assert "--base nowhere: git found no such revision" in capsys.readouterr().out


def test_it_finds_the_tests_of_this_repository() -> None:
    files = [
        str(file.relative_to(ROOT))
        for folder in ("vllm_gaudi_ucm", "ops", "tests")
        for file in (ROOT / folder).rglob("*.py")
    ]
    found = choose(Tree(ROOT, files), ["vllm_gaudi_ucm/batch/row_tiles.py"])
    assert found["tests/batch/test_row_tiles.py"] == "uses vllm_gaudi_ucm/batch/row_tiles.py"
    assert not any(file.startswith("tests/store/") for file in found)
