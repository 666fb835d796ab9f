"""Both ways of installing import the same modules from the right place, away from the repository."""

import json
from pathlib import Path

import pytest

from tests.packaging.source_tree import ROOT, run_python

pytestmark = pytest.mark.slow  # starts processes

PROBE = """
import importlib.util, json, sys
from importlib.metadata import entry_points, version
import vllm_gaudi_ucm
import vllm_gaudi_ucm.graphs.shapes.bucket as bucket
import vllm_gaudi_ucm.ops.unified_attention.parts as parts
(plugin,) = entry_points(group="vllm.platform_plugins", name="gaudi_ucm")
(script,) = entry_points(group="console_scripts", name="gaudi-ucm")
print(json.dumps({
    "package": vllm_gaudi_ucm.__file__, "bucket": bucket.__file__, "parts": parts.__file__,
    "register": plugin.load() is vllm_gaudi_ucm.register, "script": callable(script.load()),
    "globals": [name for name in ("ops", "graphs") if importlib.util.find_spec(name)],
    "version": vllm_gaudi_ucm.__version__ == version("vllm-gaudi-ucm"),
    "vllm": sorted(name for name in sys.modules if name.split(".")[0] in ("vllm", "habana_frameworks")),
}))
"""

INSTALLS = ("wheel", "editable")


@pytest.fixture(scope="module", params=INSTALLS)
def python(request: pytest.FixtureRequest) -> Path:
    """Interpreter of an environment with one kind of install."""
    interpreter: Path = request.getfixturevalue(f"{request.param}_python")
    return interpreter


@pytest.fixture(scope="module")
def probe(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What an interpreter sees that starts in an empty folder."""
    result = run_python("-c", PROBE, cwd=tmp_path_factory.mktemp("elsewhere"), python=python)
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_modules_come_from_this_install(probe: dict[str, object]) -> None:
    """Not from the repository: then the test would say nothing about the install."""
    for module in ("package", "bucket", "parts"):
        assert not Path(str(probe[module])).is_relative_to(ROOT), probe[module]


def test_rooms_are_not_global_modules(probe: dict[str, object]) -> None:
    assert probe["globals"] == []


def test_entry_points_resolve(probe: dict[str, object]) -> None:
    assert probe["register"] is True
    assert probe["script"] is True


def test_the_version_is_that_of_the_install(probe: dict[str, object]) -> None:
    assert probe["version"] is True


def test_rooms_and_entry_points_load_without_vllm(probe: dict[str, object]) -> None:
    assert probe["vllm"] == []


@pytest.mark.parametrize("room", ["ops", "graphs"])
def test_importing_a_room_by_its_repository_name_fails(python: Path, tmp_path: Path, room: str) -> None:
    result = run_python("-c", f"import {room}", cwd=tmp_path, python=python)
    assert result.returncode != 0
    assert f"No module named '{room}'" in result.stderr


def test_console_script_runs(python: Path, tmp_path: Path) -> None:
    script = python.parent / "gaudi-ucm"
    result = run_python(str(script), "--help", cwd=tmp_path, python=python)
    assert result.returncode == 0, result.stderr
    assert "fetch-model" in result.stdout


def test_editable_install_sees_a_new_module(editable_python: Path, source: Path, tmp_path: Path) -> None:
    """Files added after the install, in a room and in a folder of it, import without another install."""
    added = [source / "graphs" / "added_later.py", source / "ops" / "unified_attention" / "added_later.py"]
    try:
        for path in added:
            path.write_text("VALUE = 7\n")
        check = (
            "from vllm_gaudi_ucm.graphs.added_later import VALUE as one; "
            "from vllm_gaudi_ucm.ops.unified_attention.added_later import VALUE as two; assert one == two == 7"
        )
        result = run_python("-c", check, cwd=tmp_path, python=editable_python)
        assert result.returncode == 0, result.stderr
    finally:
        for path in added:
            path.unlink()
