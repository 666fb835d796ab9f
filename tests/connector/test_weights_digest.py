"""Weights are told apart by their content, not by where they lie."""

from __future__ import annotations

from pathlib import Path

from vllm_gaudi_ucm.connector.forward_inputs import weights_digest


def make(folder: Path, content: bytes, name: str = "model.safetensors") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return weights_digest(str(folder))


def test_content_name_and_size_count(tmp_path: Path) -> None:
    """covers: D1"""
    content = bytes(range(256)) * 4096
    first = make(tmp_path / "a", content)
    assert first == make(tmp_path / "b", content)
    assert first != make(tmp_path / "c", content[:-1])
    assert first != make(tmp_path / "d", content[:-1] + b"x")
    assert first != make(tmp_path / "e", b"x" + content[1:])
    assert first != make(tmp_path / "f", content, "other.safetensors")
    assert first != make(tmp_path / "a", content, "second.safetensors")


def test_other_files_do_not(tmp_path: Path) -> None:
    first = make(tmp_path / "a", b"w")
    (tmp_path / "a" / "README.md").write_text("about")
    assert weights_digest(str(tmp_path / "a")) == first
    assert weights_digest("organisation/model") == ""
    assert make(tmp_path / "empty", b"") != first
