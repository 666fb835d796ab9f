"""The peer's environment gets everything that its vLLM needs, except torch and what would replace it."""

from pathlib import Path

from packaging.requirements import Requirement

from tests.packaging.source_tree import ROOT, run_python


def test_torch_and_its_companions_are_left_out(tmp_path: Path) -> None:
    """The installed vLLM stands for the peer: its requirements have markers, extras and version ranges alike."""
    result = run_python(str(ROOT / "scripts" / "requirements_of.py"), "vllm", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = {requirement.name: requirement for requirement in map(Requirement, result.stdout.split("\n")[:-1])}
    assert not {name for name in found if name.startswith("torch")}
    assert found["fastapi"].extras == {"standard"}
    assert str(found["lm-format-enforcer"].specifier)
    assert "pandas" not in found, "it belongs to an extra of vLLM"
    assert found["protobuf"].specifier.contains("7.0.0"), "the line for another processor was taken"
