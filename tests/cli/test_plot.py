"""`gaudi-ucm plot`: a picture with something on it, a page that stands alone."""

from __future__ import annotations

import builtins
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observability.records import step, write_log
from vllm_gaudi_ucm.cli import main as cli


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plot")
    log, buckets = folder / "chat.jsonl", folder / "buckets.yaml"
    assert cli.main(["trace", "--mix", "chat", "--steps", "400", "-o", str(log)]) == 0
    assert cli.main(["tune", str(log), "--max-graphs", "16", "--gap", "1", "-o", str(buckets)]) == 0
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


class Drawn:
    """The axes that `draw` filled, and what is on the two that show sizes."""

    def __init__(self, log: Path, buckets: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        figure = pytest.importorskip("matplotlib.figure")
        figures: list[Any] = []
        whole = figure.Figure.savefig

        def savefig(self: Any, *args: Any) -> None:
            whole(self, *args)
            figures.append(self)

        monkeypatch.setattr(figure.Figure, "savefig", savefig)
        assert run(log, "--buckets", buckets, "-o", folder / "steps.png") == 0
        self.figure = figures[0]
        self.sizes = self.figure.axes[:2]


@pytest.fixture(params=["tuned", "only the maximum"])
def drawn(
    request: pytest.FixtureRequest, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Drawn:
    buckets = files[1]
    if request.param == "only the maximum":
        buckets = tmp_path / "maximum.yaml"
        text = files[1].read_text()
        buckets.write_text(text[: text.index("- [")] + '- ["csu", 2048, 3399, 3399]\n')
    return Drawn(files[0], buckets, monkeypatch, tmp_path)


def test_every_mark_is_inside_of_the_axes(drawn: Drawn) -> None:
    """With room for half a mark; the configured maximum, and buckets that no step uses, are marks, too."""
    for axes in drawn.sizes:
        frame = axes.get_window_extent()
        marks = [collection for collection in axes.collections if len(collection.get_offsets())]
        points = np.concatenate([axes.transData.transform(mark.get_offsets()) for mark in marks])
        # points of 1/72 inch; the largest mark is a square of 6
        room = 3 * drawn.figure.dpi / 72
        assert points[:, 0].min() >= frame.x0 + room
        assert points[:, 0].max() <= frame.x1 - room
        assert points[:, 1].min() >= frame.y0 + room
        assert points[:, 1].max() <= frame.y1 - room
        widest = max(float(mark.get_offsets()[:, 0].max()) for mark in marks)
        assert widest == 2048
    unique = np.concatenate([mark.get_offsets() for mark in drawn.sizes[0].collections])
    assert unique[:, 1].max() == 3399


def test_labels_are_inside_of_the_picture(drawn: Drawn) -> None:
    width, height = drawn.figure.canvas.get_width_height()
    for axes in drawn.figure.axes:
        for text in axes.texts:
            extent = text.get_window_extent()
            assert 0 <= extent.x0 <= extent.x1 <= width
            assert 0 <= extent.y0 <= extent.y1 <= height


def test_as_many_graphs_as_the_file_has(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Also for a server with more blocks than the one that the file was made for."""
    output = tmp_path / "steps.html"
    for more in ((), ("--num-blocks", "5000")):
        assert run(files[0], "--buckets", files[1], "-o", output, *more) == 0
        assert ">16 graphs;" in output.read_text()


def test_the_page_fills_the_window(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Charts scale with the page, two beside each other where there is room."""
    output = tmp_path / "steps.html"
    assert run(files[0], "--buckets", files[1], "-o", output) == 0
    text = output.read_text()
    assert re.findall(r"<svg[^>]*>", text) == ['<svg viewBox="0 0 560 400" role="img">'] * 2
    assert "max-width: 1200px" not in text
    assert re.search(r"svg { width: 100%", text)


def test_every_square_is_inside_of_the_chart(files: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "steps.html"
    assert run(files[0], "--buckets", files[1], "-o", output) == 0
    squares = re.findall(r'<rect x="([0-9.-]+)" y="([0-9.-]+)" width="8"', output.read_text())
    assert len(squares) == 2 * 15
    assert all(0 <= float(x) <= 552 and 0 <= float(y) <= 392 for x, y in squares)
    # the largest is the configured maximum, which is the end of both axes
    assert output.read_text().count("2048 / 3399 / 3399") == 2


def test_one_step_is_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "one.jsonl"
    write_log(log, [step(0)])
    assert run(log, "-o", tmp_path / "one.html") == 0
    text = (tmp_path / "one.html").read_text()
    assert "<h1>tiny: 1 step</h1>" in text
    assert "1 steps" not in text
    assert cli.main(["trace", "--mix", "chat", "--steps", "1", "-o", str(log)]) == 0
    assert ": 1 step of the mix chat" in capsys.readouterr().out


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
        ((files[0], "-o", tmp_path / "x.png"), "pip install 'vllm-gaudi-ucm[tools]'"),
        ((files[0], "--buckets", empty, "-o", tmp_path / "x.html"), "is this a bucket file"),
    ):
        assert run(*arguments) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
