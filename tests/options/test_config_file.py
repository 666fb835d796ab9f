"""Configuration files: YAML and JSON, with and without the key `ucm`, and every way a file can be wrong."""

from pathlib import Path

import pytest

from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_config
from vllm_gaudi_ucm.options.errors import UcmConfigError


def write(folder: Path, name: str, text: str) -> str:
    """Writes a file and returns its path as vLLM's JSON option would carry it."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.yaml", "cpu:\n  threads: 2\nattention:\n  contiguous_pa: off\n"),
        ("under_key.yml", "ucm:\n  cpu: {threads: 2}\n  attention: {contiguous_pa: false}\n"),
        ("plain.json", '{"cpu": {"threads": 2}, "attention": {"contiguous_pa": false}}'),
        ("under_key.json", '{"ucm": {"cpu": {"threads": 2}, "attention": {"contiguous_pa": false}}}'),
    ],
)
def test_file(tmp_path: Path, name: str, text: str) -> None:
    config = resolve_config({"ucm": write(tmp_path, name, text)})
    assert config.cpu.threads == 2
    assert config.attention.contiguous_pa is False


@pytest.mark.parametrize("text", ["", "# only a comment\n", "ucm:\n"])
def test_empty_file_means_defaults(tmp_path: Path, text: str) -> None:
    assert resolve_config({"ucm": write(tmp_path, "empty.yaml", text)}) == UcmConfig()


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "ucm.yaml", "cpu: {threads: 7}")
    assert resolve_config({"ucm": "~/ucm.yaml"}).cpu.threads == 7


def message_of(path: str) -> str:
    """The message that a file's problems raise."""
    with pytest.raises(UcmConfigError) as caught:
        resolve_config({"ucm": path})
    return str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    missing = message_of(str(tmp_path / "none.yaml"))
    assert f"ucm: found file '{tmp_path}/none.yaml' that cannot be read (No such file or directory)" in missing
    assert "that cannot be read (Is a directory)" in message_of(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("bad.yaml", "cpu:\n  threads: 2\n attention: 3\n", "line 3"),
        ("tab.yaml", "cpu:\n\tthreads: 2\n", "line 2, column 1"),
        ("twice.yaml", "cpu: {threads: 2}\nattention: {}\ncpu: {}\n", "line 3, column 1: key 'cpu' is given twice"),
        ("bad.json", '{\n "cpu": {\n}', "line 3, column 2"),
    ],
)
def test_malformed_file_names_the_place(tmp_path: Path, name: str, text: str, place: str) -> None:
    message = message_of(write(tmp_path, name, text))
    assert "malformed file" in message
    assert name in message
    assert place in message


def test_yaml_tags_run_nothing(tmp_path: Path) -> None:
    """covers: D6. A tag that plain YAML would execute is a malformed file."""
    mark = tmp_path / "ran"
    text = f"cpu: !!python/object/apply:os.mkdir ['{mark}']\n"
    assert "could not determine a constructor" in message_of(write(tmp_path, "evil.yaml", text))
    assert not mark.exists()


def test_problems_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "ucm.yaml", "ucm:\n  cpu: {threads: 0}\n")
    assert f"(file {path}): ucm.cpu.threads: found 0" in message_of(path)


def test_file_that_is_a_list_or_not_text(tmp_path: Path) -> None:
    assert "ucm: found [1], expected a mapping" in message_of(write(tmp_path, "list.yaml", "- 1\n"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    assert "not UTF-8 text" in message_of(str(tmp_path / "binary.yaml"))
