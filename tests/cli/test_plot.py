"""`gaudi-ucm plot`: a picture with something on it, a page that stands alone."""

from __future__ import annotations

import builtins
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.observability.records import write_log
from vllm_gaudi_ucm.cli import main as cli


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plot")
    log, buckets = folder / "chat.jsonl", folder / "buckets.yaml"
    assert cli.main(["trace", "--mix", "chat", "--steps", "400", "-o", str(log)]) == 0
    assert cli.main(["tune", str(log), "--max-graphs", "16", "-o", str(buckets)]) == 0
    return log, buckets


def run(*argv: str | Path) -> int:
    return cli.main(["plot", *map(str, argv)])


@pytest.mark.parametrize("with_buckets", [True, False])
def test_the_picture(files: tuple[Path, Path], tmp_path: Path, with_buckets: bool) -> None:
    image = pytest.importorskip("matplotlib.image")
    picture = tmp_path / "steps.png"
    assert run(files[0], "-o", picture, *(["--buckets", files[1]] if with_buckets else [])) == 0
    pixels = image.imread(picture)[..., :3]
    assert min(pixels.shape[:2]) > 900
    coloured = (pixels.max(axis=2) - pixels.min(axis=2)) > 0.2
    assert coloured.mean() > 0.01


def test_the_page_stands_alone(files: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "steps.html"
    assert run(files[0], "--buckets", files[1], "-o", output) == 0
    text = output.read_text()
    assert not re.search(r"<script|<link|src=|https?://", text)
    assert text.count("<rect") >= 2
    assert text.count("<circle") > 100
    assert "padded / true" in text
    for svg in re.findall(r"<svg.*?</svg>", text):
        assert ElementTree.fromstring(svg).tag == "svg"
    assert run(files[0], "-o", output) == 0
    assert "<rect" not in output.read_text()


def test_unusable_input_is_one_line(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    write_log(empty, [])
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    for arguments, message in (
        ((files[0], "-o", tmp_path / "x.gif"), "expected a name that ends in .png"),
        ((empty, "-o", tmp_path / "x.html"), "holds no steps"),
        ((files[0], "-o", tmp_path / "x.png"), "pip install 'vllm-gaudi-ucm[demo]'"),
        ((files[0], "--buckets", empty, "-o", tmp_path / "x.html"), "is this another file"),
    ):
        assert run(*arguments) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
