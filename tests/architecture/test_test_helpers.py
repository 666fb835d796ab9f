"""What several test files need is in modules that hold no tests."""

from __future__ import annotations

from tests.architecture.sources import ROOT, imported


def test_no_file_imports_another_files_tests() -> None:
    """A file of tests runs alone, and is read alone: its imports name helpers."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.name.startswith("test_")
    }
    assert len(modules) > 400
    wrong = {
        str(file.relative_to(ROOT)): sorted(found)
        for file in files
        if (found := {name for name in imported(file) if name in modules or name.rpartition(".")[0] in modules})
    }
    assert not wrong, "move what they share to a module of its own"
