"""Which way multiplies how many rows: by measured times, by rule without them, and the file that keeps them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_gaudi_ucm.ops.cpu.native import library
from vllm_gaudi_ucm.ops.cpu.packed_linear import measured_ways
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import pack, packed_linear
from vllm_gaudi_ucm.ops.cpu.packed_linear.measured_ways import kinds_of, learn_ways, measure
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import MEASURED_ROWS, Kind, Times, Way, set_times, times_of, ways

needs_kernels = pytest.mark.skipif(library.native() is None, reason=library.why_not_native())
ALL = ways(tiles=True, onednn=True)


def times(vectors: list[int], tiles: list[int], onednn: list[int]) -> dict[Way, tuple[float, ...]]:
    """Torch's own product takes twice as long as oneDNN's."""
    plain = tuple(2 * one for one in onednn)
    return {Way.VECTORS: tuple(vectors), Way.TILES: tuple(tiles), Way.ONEDNN: tuple(onednn), Way.PLAIN: plain}


# Sapphire Rapids, 3072 x 576, microseconds: what pairs and oneDNN took there, and a unit as fast as oneDNN
SAPPHIRE = times([250, 260, 285, 529, 978, 1900, 3800, 7600], [250, 255, 260, 262, 270, 300, 340, 700], [290] * 8)
ZEN5 = times([80, 82, 85, 95, 110, 170, 320, 600], [10**6] * 8, [90, 95, 100, 110, 130, 190, 340, 620])


@pytest.mark.parametrize(
    ("seconds", "rows", "given", "expected"),
    [
        (SAPPHIRE, 1, ALL, Way.VECTORS),
        (SAPPHIRE, 16, ALL, Way.TILES),
        (SAPPHIRE, 16, ways(tiles=False, onednn=True), Way.ONEDNN),
        (SAPPHIRE, 5, ways(tiles=False, onednn=True), Way.ONEDNN),
        (SAPPHIRE, 1000, ALL, Way.ONEDNN),
        (SAPPHIRE, 1000, ways(tiles=False, onednn=False), Way.VECTORS),
        (ZEN5, 16, ways(tiles=False, onednn=True), Way.VECTORS),
        (ZEN5, 64, ways(tiles=False, onednn=True), Way.VECTORS),
        (ZEN5, 65, ways(tiles=False, onednn=True), Way.ONEDNN),
    ],
)
def test_the_fastest_way_multiplies(
    seconds: dict[Way, tuple[float, ...]], rows: int, given: tuple[Way, ...], expected: Way
) -> None:
    """Few rows stay native unless oneDNN is faster by far: only native products make a graph."""
    assert Times(Kind.PAIRS, seconds).fastest(rows, given) is expected


@pytest.mark.parametrize("disturbed", [(0, 2), (3,), (7, 1), (5, 6)])
@pytest.mark.parametrize("way", [Way.VECTORS, Way.TILES, Way.ONEDNN])
def test_disturbed_times_keep_no_decode_out_of_graphs(way: Way, disturbed: tuple[int, ...]) -> None:
    """Other programs make some times many times as long; the choice for up to 64 rows stays native."""
    seconds = {
        one: tuple(
            20 * time if column in disturbed and one in (way, Way.VECTORS) else time for column, time in enumerate(row)
        )
        for one, row in SAPPHIRE.items()
    }
    found = [Times(Kind.PAIRS, seconds).fastest(rows, ALL) for rows in (1, 2, 4, 8, 16, 32, 64)]
    assert Way.ONEDNN not in found
    assert found[3:5] == [Way.TILES, Way.TILES]


def test_few_rows_of_a_weight_in_fewer_bits_stay_native() -> None:
    """oneDNN has to read more from memory, which the times of a weight in the cache do not show."""
    seconds = times([9] * 8, [9] * 8, [1] * 8)
    given = ways(tiles=False, onednn=True)
    assert Times(Kind.BFLOAT16, seconds).fastest(8, given) is Way.VECTORS
    assert Times(Kind.BFLOAT16, seconds).fastest(100, given) is Way.ONEDNN
    assert Times(Kind.FLOAT32, seconds).fastest(8, given) is Way.ONEDNN


@pytest.mark.parametrize("kind", [Kind.PAIRS, Kind.BFLOAT16, Kind.FLOAT32])
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 65, 1000])
def test_without_times_a_rule_decides(kind: Kind, rows: int) -> None:
    known = times_of(kind)
    assert known.fastest(rows, ways(tiles=False, onednn=True)) is (Way.VECTORS if rows <= 64 else Way.ONEDNN)
    many = Way.ONEDNN if kind is Kind.PAIRS else Way.TILES
    few = Way.VECTORS if kind is Kind.FLOAT32 or rows == 1 else Way.TILES
    assert known.fastest(rows, ALL) is (few if rows <= 64 else many)


def test_a_copy_for_onednn_is_kept_where_it_is_faster_with_many_rows() -> None:
    assert Times(Kind.PAIRS, SAPPHIRE).needs_onednn(ALL)
    assert not Times(Kind.PAIRS, ZEN5).needs_onednn(ways(tiles=False, onednn=True))
    assert times_of(Kind.PAIRS).needs_onednn(ALL)


@pytest.mark.parametrize(
    ("plain", "rows", "expected"),
    [
        ([900] * 5 + [100] * 3, 16, Way.VECTORS),
        ([900] * 5 + [100] * 3, 17, Way.PLAIN),
        ([900] * 5 + [100] * 3, 129, Way.PLAIN),
        ([900] * 8, 1000, Way.ONEDNN),
    ],
)
def test_a_plain_weight_is_taken_where_times_say_so(plain: list[int], rows: int, expected: Way) -> None:
    """Beyond the rows that were measured, the largest of them decides."""
    seconds = {**ZEN5, Way.PLAIN: tuple(plain)}
    given = ways(tiles=False, onednn=True, plain=True)
    assert Times(Kind.FLOAT32, seconds).fastest(rows, given) is expected
    assert times_of(Kind.FLOAT32).fastest(rows, given) is not Way.PLAIN, "without times the rule has no plain weights"


def test_in_words() -> None:
    assert Times(Kind.PAIRS, SAPPHIRE).described(ALL) == "vectors up to 1 row, matrix unit up to 64 rows, oneDNN beyond"
    assert times_of(Kind.FLOAT32).described(ways(tiles=False, onednn=False)) == "vectors for any number of rows"


@needs_kernels
def test_times_are_measured_once_for_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a second process reads is what the first has measured, so that all ranks of an engine choose alike."""
    monkeypatch.setattr(measured_ways, "WITHIN", math.inf)
    monkeypatch.setattr(measured_ways, "LONGEST", math.inf)
    monkeypatch.setattr(measured_ways, "LEAST_GROWTH", 0.0)
    learn_ways({Kind.FLOAT32}, tmp_path)
    measured = times_of(Kind.FLOAT32).seconds
    assert all(len(seconds) == len(MEASURED_ROWS) for seconds in measured.values())
    set_times({})
    monkeypatch.setattr(measured_ways, "measure", lambda kind: pytest.fail(f"{kind} is measured again"))
    learn_ways({Kind.FLOAT32}, tmp_path)
    assert times_of(Kind.FLOAT32).seconds == measured


@needs_kernels
@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        '{"float32": {"oneDNN": [1]}}',
        '{"float32": {"vectors": [1, 1, 1, 1, 1, 1, 1, 1]}}',
        '{"float32": {"oneDNN": [1, 1, 1, 1, 1, 1, 1, 1]}}',
        '{"float32": {"oneDNN": [1, 1, 1, 1, 1, 1, 1, -1]}}',
        '{"float32": {"oneDNN": [1, 1, 1, 1, 1, 1, 1, NaN]}}',
        '{"other": {}}',
        '{"float32": {"oneDNN": null}}',
    ],
)
def test_a_damaged_file_is_written_anew(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_ways, "measure", lambda kind: times([1] * 8, [1] * 8, [1] * 8))
    learn_ways({Kind.FLOAT32}, tmp_path)
    (path,) = tmp_path.glob("product-times-*.json")
    good = path.read_text()
    path.write_text(content)
    learn_ways({Kind.FLOAT32}, tmp_path)
    assert json.loads(path.read_text()) == json.loads(good)
    assert list(tmp_path.iterdir()) == [path]


@needs_kernels
def test_a_file_that_others_may_write_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_ways, "measure", lambda kind: times([1] * 8, [1] * 8, [1] * 8))
    learn_ways({Kind.FLOAT32}, tmp_path)
    (path,) = tmp_path.glob("product-times-*.json")
    path.write_text(path.read_text().replace("1", "2"))
    path.chmod(0o666)
    learn_ways({Kind.FLOAT32}, tmp_path)
    assert times_of(Kind.FLOAT32).seconds[Way.ONEDNN] == (1.0,) * 8
    assert path.stat().st_mode & 0o777 == 0o600


@needs_kernels
def test_without_a_folder_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would measure for itself, and choose another way."""
    monkeypatch.setattr(measured_ways, "measure", lambda kind: pytest.fail("measured"))
    tmp_path.chmod(0o777)
    learn_ways({Kind.FLOAT32}, tmp_path)
    assert not times_of(Kind.FLOAT32).seconds


@needs_kernels
def test_a_weight_is_multiplied_in_the_way_that_was_measured() -> None:
    weight = torch.randn(64, 96)
    packed = pack(weight)
    if packed.panels is None:
        pytest.skip("oneDNN packs in a format of its own here")
    x = torch.randn(3, 96)
    # what one of the two reads is missing, so the other has multiplied
    for faster, copy in ((Way.VECTORS, packed._replace(tensor=torch.empty(0))), (Way.ONEDNN, packed)):
        seconds = {way: ((1.0,) if way is faster else (9.0,)) * 8 for way in Way}
        set_times({Kind.FLOAT32: seconds})
        torch.testing.assert_close(packed_linear(x, copy), x @ weight.T, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.PAIRS])
def test_every_kind_can_be_measured(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine however busy."""
    monkeypatch.setattr(measured_ways, "WITHIN", math.inf)
    monkeypatch.setattr(measured_ways, "LONGEST", math.inf)
    monkeypatch.setattr(measured_ways, "LEAST_GROWTH", 0.0)
    found = measure(kind)
    assert Way.ONEDNN in found
    assert all(second > 0 for seconds in found.values() for second in seconds)


class Clock:
    """In place of `time`: each call of a product takes the next of these seconds."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self._seconds, self._now = seconds, 0.0

    def perf_counter(self) -> float:
        return self._now

    def product(self) -> None:
        self._now += next(self._seconds)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # the first call fills the caches
        ([9.0, 0.01, 0.01, 0.01], 0.01),
        ([9.0, 0.05, 0.0101, 0.03, 0.01, 0.04, 0.0102], 0.01),
        # a time slice of another program in each of them
        ([9.0, *(0.01 * 1.1**turn for turn in range(40))], None),
    ],
)
def test_a_time_counts_when_it_has_come_again(
    seconds: list[float], expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(iter(seconds))
    monkeypatch.setattr(measured_ways, "time", clock)
    found = measured_ways._least_times({Way.VECTORS: clock.product})
    assert (found and found[Way.VECTORS]) == (expected and pytest.approx(expected))


@needs_kernels
def test_a_busy_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where times never come again, nor where a time slice hides how long a product takes."""
    monkeypatch.setattr(measured_ways, "_least_times", lambda calls: None)
    assert measure(Kind.FLOAT32) == {}
    monkeypatch.setattr(measured_ways, "_least_times", lambda calls: dict.fromkeys(calls, 0.004))
    assert measure(Kind.FLOAT32) == {}


@needs_kernels
def test_what_was_disturbed_is_measured_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the other ranks of the same engine, who would choose another way."""
    monkeypatch.setattr(measured_ways, "measure", lambda kind: {})
    learn_ways({Kind.FLOAT32}, tmp_path)
    monkeypatch.setattr(measured_ways, "measure", lambda kind: times([1] * 8, [1] * 8, [1] * 8))
    learn_ways({Kind.FLOAT32}, tmp_path)
    assert times_of(Kind.FLOAT32).seconds == {}
    (path,) = tmp_path.glob("product-times-*.json")
    earlier = path.stat().st_mtime - measured_ways.MEASURED_AGAIN_AFTER - 1
    os.utime(path, (earlier, earlier))
    learn_ways({Kind.FLOAT32}, tmp_path)
    assert times_of(Kind.FLOAT32).seconds[Way.ONEDNN] == (1.0,) * 8


@needs_kernels
def test_kinds_of_weights() -> None:
    weights = [pack(torch.randn(64, 96)), pack(torch.randn(64, 96).bfloat16().float(), compact=True)]
    assert kinds_of(weights) <= {Kind.FLOAT32, Kind.BFLOAT16}
    assert Kind.BFLOAT16 in kinds_of(weights)
