"""The file of the phase log: written line by line, read back exactly, damage named with its line."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from tests.observability.records import HEADER, mixed_steps, step, write_log
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm.observability.phase_log import (
    SCHEMA,
    PhaseLog,
    PhaseLogError,
    PhaseLogReader,
    bucket_shapes,
    read_phase_log,
)
from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary, summary_text
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm_tools.phases.summary_json import summary_json

OLD_FIELDS = (
    *("step", "bucket", "padded", "requests", "prompts", "tokens", "causal_pairs", "shared_pairs", "unique_pairs"),
    *("plan_ms", "forward_ms", "sample_ms"),
)


def test_what_a_connector_moved(tmp_path: Path) -> None:
    """Written where there is any: the log of a server without a connector is what it always was."""
    shape = Bucket("--u", 4, 0, 9, 4)
    moved = StepRecord(0, shape, shape, 4, 0, 4, 0, 0, 6, 0.5, 31.5, 2.0, 0, 0, 12, 3, 0.25)
    nothing = StepRecord(1, shape, shape, 4, 0, 4, 0, 0, 6, 0.5, 31.5, 2.0)
    path = tmp_path / "phases.jsonl"
    log = PhaseLog(path)
    log.append(moved)
    log.append(nothing)
    log.close()
    assert read_phase_log(path)[1] == [moved, nothing]
    lines = path.read_text().splitlines()
    assert lines[1].endswith('"sample_ms":2.0000,"loaded_blocks":12,"saved_blocks":3,"transfer_ms":0.2500}')
    assert lines[2].endswith('"sample_ms":2.0000}')


def test_what_the_host_did(tmp_path: Path) -> None:
    """Reads and names of stages, where there are any; names that are none are an error."""
    path = tmp_path / "phases.jsonl"
    worked = replace(step(1), host_reads=3, host_stages=("sampling: seed", "drafts by n-grams"))
    write_log(path, [step(0), worked])
    assert read_phase_log(path)[1] == [step(0), worked]
    header, ordinary, line = path.read_text().splitlines()
    assert "host" not in ordinary
    assert line.endswith('"host_reads":3,"host_stages":["sampling: seed", "drafts by n-grams"]}')
    path.write_text("\n".join([header, line.replace('["sampling: seed"', "[1")]) + "\n")
    with pytest.raises(PhaseLogError, match=r"host_stages.*expected a list of names"):
        read_phase_log(path)
    total = PhaseSummary([step(0), worked]).total()
    assert (total.host_reads, total.host_stages) == (3, {"sampling: seed": 1, "drafts by n-grams": 1})
    shown = summary_text(PhaseSummary([step(0), worked]))
    assert "the host read the device 1.50 times a step" in shown
    assert "ran on the host, in steps: sampling: seed 1, drafts by n-grams 1" in shown
    assert "host" not in summary_text(PhaseSummary([step(0)]))


def test_what_was_done_with_blocks(tmp_path: Path) -> None:
    """Written where there is any, and summed up."""
    path = tmp_path / "phases.jsonl"
    swapped = replace(step(1), copied_blocks=2, swapped_out_blocks=7, swapped_in_blocks=5)
    moved = replace(step(2), moved_blocks=3, copied_blocks=1)
    write_log(path, [step(0), swapped, moved])
    assert read_phase_log(path)[1] == [step(0), swapped, moved]
    _, ordinary, line, _ = path.read_text().splitlines()
    assert "blocks" not in ordinary
    assert line.endswith(',"copied_blocks":2,"swapped_out_blocks":7,"swapped_in_blocks":5}')
    summary = PhaseSummary([step(0), swapped, moved])
    sums = {"copied_blocks": 3, "moved_blocks": 3, "swapped_out_blocks": 7, "swapped_in_blocks": 5}
    assert {name: summary_json(summary)[name] for name in sums} == sums
    assert "blocks before steps: copied 3, moved 3, swapped out 7, swapped in 5" in summary_text(summary)
    assert "before steps" not in summary_text(PhaseSummary([step(0)]))
    assert not {*sums} & {*summary_json(PhaseSummary([step(0)]))}


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    true, padded = Bucket("cs-", 1024, 2, 0, 7), Bucket("csu", 2048, 4, 8, 16)
    record = StepRecord(3, true, padded, 9, 4, 1024, 10**12, 5, 0, 0.0125, 31.5, 2.0)
    write_log(path, [*mixed_steps(50), record])
    header, records = read_phase_log(path)
    assert header == {"schema": SCHEMA, **HEADER}
    assert len(records) == 51
    assert records[-1] == record
    assert isinstance(records[-1].padded, Bucket)


def test_a_sparse_step_is_read_back(tmp_path: Path) -> None:
    """Its numbers are written where there are any: a log without sparse steps is what it was."""
    path = tmp_path / "phases.jsonl"
    true, padded = Bucket("-su", 4, 2, 9, 4, 30), Bucket("-su", 8, 4, 16, 8, 64)
    sparse = StepRecord(1, true, padded, 4, 0, 4, 0, 5, 6, 0.5, 31.5, 2.0, selected_pairs=960, sparse=3)
    padded_alone = StepRecord(2, true._replace(selected_blocks=0), padded, 4, 0, 4, 0, 5, 6, 0.5, 31.5, 2.0)
    write_log(path, [step(0), sparse, padded_alone])
    assert read_phase_log(path)[1] == [step(0), sparse, padded_alone]
    _, dense, *lines = path.read_text().splitlines()
    assert list(json.loads(dense)) == [*OLD_FIELDS]
    assert json.loads(lines[0])["bucket"] == ["-su", 4, 2, 9, 4, 30]
    assert json.loads(lines[1])["bucket"] == ["-su", 4, 2, 9, 4]
    assert json.loads(lines[1])["padded"] == ["-su", 8, 4, 16, 8, 64]


def test_a_step_that_ran_in_a_graph_for_remainders(tmp_path: Path) -> None:
    """Buckets are not tuned for it: it runs there whatever they are."""
    path = tmp_path / "phases.jsonl"
    true, padded = Bucket("cs-", 12, 3, 0, 1, 9), Bucket("cs-", 16, 4, 0, 1, 20)
    tail = StepRecord(
        1, true, padded, 1, 1, 12, 78, 576, 0, 0.5, 31.5, 2.0, selected_pairs=1728, sparse=1, prompt_remainder=1
    )
    write_log(path, [step(0), tail])
    records = read_phase_log(path)[1]
    assert records == [step(0), tail]
    assert list(bucket_shapes(records)) == [step(0).bucket]
    _, ordinary, line = path.read_text().splitlines()
    assert "prompt_remainder" not in ordinary
    assert line.endswith('"sparse":1,"prompt_remainder":1}')


def test_a_log_with_the_earlier_name_of_the_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    remainder = StepRecord(
        1, Bucket("cs-", 12, 3, 0, 1), Bucket("cs-", 16, 4, 0, 1), 1, 1, 12, 78, 5, 0, 0.5, 3.0, 2.0, prompt_remainder=1
    )
    write_log(path, [remainder])
    path.write_text(path.read_text().replace('"prompt_remainder":', '"tail":'))
    with pytest.warns(FutureWarning, match="'tail' 'prompt_remainder' now"):
        assert read_phase_log(path)[1] == [remainder]


def test_a_known_reach_is_read_back(tmp_path: Path) -> None:
    """Written where it says more than the number of rows does; absent it says nothing."""
    path = tmp_path / "phases.jsonl"
    true, padded = Bucket("c--", 4000, 0, 0, 4, 0, 2), Bucket("c--", 4096, 0, 0, 8)
    packed = StepRecord(1, true, padded, 8, 8, 4000, 10, 0, 0, 0.5, 31.5, 2.0)
    write_log(path, [packed])
    assert read_phase_log(path)[1] == [packed]
    line = json.loads(path.read_text().splitlines()[1])
    assert (line["bucket"], line["padded"]) == (["c--", 4000, 0, 0, 4, 0, 2], ["c--", 4096, 0, 0, 8])
    assert padded.max_prompt_tiles == ALL_TILES


def test_times_survive_to_a_tenth_of_a_microsecond(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    written = mixed_steps(100)
    write_log(path, written)
    for before, after in zip(written, read_phase_log(path)[1], strict=True):
        assert after.forward_ms == pytest.approx(before.forward_ms, abs=1e-4)
        assert (after.step, after.bucket, after.tokens) == (before.step, before.bucket, before.tokens)


def test_steps_are_read_one_by_one(tmp_path: Path) -> None:
    """What stands behind the line that is asked for is not even looked at; nor is it to count the steps."""
    path = tmp_path / "phases.jsonl"
    written = mixed_steps(10)
    write_log(path, written)
    path.write_text(path.read_text() + "nonsense\n")
    with PhaseLogReader(path) as log:
        steps = log.steps()
        assert [next(steps).step for _ in written] == list(range(10))
        assert log.count() == 11
        with pytest.raises(PhaseLogError, match=r":12: not JSON"):
            next(steps)


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_complete_steps_are_counted(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(10))
    text = path.read_bytes()
    path.write_bytes(text[: len(text) - cut])
    with PhaseLogReader(path) as log:
        assert log.count() == len(list(log.steps())) == (9 if cut else 10)


def test_how_much_is_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_gaudi_ucm.observability.phase_log.REPORTED_BYTES", 1000)
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(100))
    seen: list[float] = []
    with PhaseLogReader(path, seen.append) as log:
        assert len(list(log.steps())) == 100
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_long_line_that_is_no_header_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    path.write_bytes(b"\0" * (8 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(PhaseLogError, match=r"phases\.jsonl:1: "):
            read_phase_log(path)
        assert tracemalloc.get_traced_memory()[1] < 7 << 20
    finally:
        tracemalloc.stop()


def test_every_step_is_on_disk_before_close(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    log = PhaseLog(path, HEADER)
    for index in range(5):
        log.append(step(index))
        assert len(read_phase_log(path)[1]) == index + 1
    log.close()


def test_a_killed_process_loses_nothing_it_appended(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.observability.records import HEADER, step\n"
        "from vllm_gaudi_ucm.observability.phase_log import PhaseLog\n"
        "log = PhaseLog(Path(sys.argv[1]), HEADER)\n"
        "for index in range(100): log.append(step(index))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == -9
    assert [record.step for record in read_phase_log(path)[1]] == list(range(100))


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_torn_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(10))
    path.write_bytes(path.read_bytes()[:-cut])
    assert [record.step for record in read_phase_log(path)[1]] == list(range(9))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"step":1,', "not JSON"),
        ("[1, 2]", "expected a JSON object"),
        ('{"step":1}', "'bucket'"),
        (None, "'tokens'"),
        (('"sample_ms"', '"sparse":-1,"sample_ms"'), "'sparse' is -1"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: str | tuple[str, str] | None, says: str) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(10))
    lines = path.read_text().splitlines()
    lines[4] = bad if isinstance(bad, str) else lines[4].replace(*(bad or ('"tokens":40', '"tokens":-40')))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(PhaseLogError, match=f"phases.jsonl:5: .*{says}"):
        read_phase_log(path)


@pytest.mark.parametrize(
    "bucket",
    [
        ["xyz", 1, 1, 1, 1],
        ["csu", 1, 1, 1],
        ["csu", 1, -1, 1, 1],
        "csu",
        [3, 1, 1, 1, 1],
        ["csu", 1, 1, 1, 1, -1],
        ["csu", *[1] * 7],
    ],
)
def test_a_bucket_that_is_none_is_named(tmp_path: Path, bucket: object) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, [step(0)])
    header, line = path.read_text().splitlines()
    path.write_text(f"{header}\n{json.dumps({**json.loads(line), 'bucket': bucket})}\n")
    with pytest.raises(PhaseLogError, match=r":2: found bucket .* expected \[phase, query_len"):
        read_phase_log(path)


@pytest.mark.parametrize("text", ["", "hello\n", '{"model":"m"}\n', '{"schema":"gaudi-ucm.phase-log/2"}\n', "\0\xff\n"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "phases.jsonl"
    path.write_text(text)
    with pytest.raises(PhaseLogError, match=r"phases\.jsonl:1: "):
        read_phase_log(path)


OTHERS: list[tuple[bytes, str]] = [
    (b"", "found an empty file"),
    (b"time,tokens\n1,2\n", "found 'time,tokens'"),
    (b'{"event": "start"}\n{"event": "end"}\n', "found JSON without the field 'schema'"),
    (b'[{"schema": "gaudi-ucm.phase-log/1"}]\n', "found '[{"),
    (b"[\n  1\n]\n", "found '['"),
    (b'{"schema":"gaudi-ucm.buckets/1"}\n', "found 'gaudi-ucm.buckets/1'"),
    (b"\x89PNG\r\n\x1a\n\x00\x01", "found '\\ufffdPNG"),
    (gzip.compress(b'{"schema":"gaudi-ucm.phase-log/1"}\n'), "found a gzip file (unpack it)"),
    (b"[" * 100_000 + b"\n", "found '[[["),
    (b'{"schema": ' + b"9" * 5000 + b"}\n", 'found \'{"schema": 999'),
]


@pytest.mark.parametrize(("content", "found"), OTHERS, ids=[found[:28] for _, found in OTHERS])
def test_another_file_is_called_no_phase_log(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "phases.jsonl"
    path.write_bytes(content)
    with pytest.raises(PhaseLogError) as error:
        read_phase_log(path)
    assert f"{path}:1: {found}" in str(error.value)
    assert "this is no phase log" in str(error.value)
    assert str(error.value).endswith("expected a file that ucm.phase_log or `gaudi-ucm trace` wrote")
    assert len(str(error.value)) < 500
    with pytest.raises(PhaseLogError, match="cannot be read as a phase log: Is a directory"):
        read_phase_log(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", "1" + "0" * 30), ("forward_ms", "NaN"), ("sample_ms", "Infinity"), ("step", "1e400")],
)
def test_numbers_that_no_step_has(tmp_path: Path, field: str, value: str) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, [step(0)])
    path.write_text(re.sub(rf'"{field}":[0-9.]+', f'"{field}":{value}', path.read_text()))
    with pytest.raises(PhaseLogError, match=f":2: field '{field}' is .*, expected a number"):
        read_phase_log(path)


def test_sizes_that_no_bucket_has(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, [step(0)])
    path.write_text(path.read_text().replace('"bucket":["csu",40', '"bucket":["csu",' + "9" * 30))
    with pytest.raises(PhaseLogError, match=":2: found bucket "):
        read_phase_log(path)


def test_a_line_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, [step(0)])
    path.write_text(path.read_text() + "[" * 100_000 + "\n")
    with pytest.raises(PhaseLogError, match=r"phases\.jsonl:3: not JSON"):
        read_phase_log(path)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PhaseLogError, match="No such file"):
        read_phase_log(tmp_path / "none.jsonl")


def test_an_unwritable_path_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(PhaseLogError, match=r"ucm\.phase_log: cannot write .*exists and is writable"):
        PhaseLog(tmp_path / "no" / "folder" / "phases.jsonl", HEADER)


def test_the_log_of_the_run_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(3))
    write_log(path, mixed_steps(5))
    assert len(read_phase_log(path)[1]) == 5
    assert len(read_phase_log(tmp_path / "phases.jsonl.previous")[1]) == 3


def test_a_full_disk_stops_the_log_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    log = PhaseLog(None)
    log.path, log._file = full, full.open("w", buffering=1)
    with caplog.at_level("WARNING", logger="vllm.gaudi_ucm.phase_log"):
        for index in range(3):
            log.append(step(index))
    assert log.summary.steps == 3
    assert caplog.text.count("ucm.phase_log: writing /dev/full failed") == 1


def test_close_emits_the_summary_once(tmp_path: Path) -> None:
    emitted: list[str] = []
    log = PhaseLog(tmp_path / "phases.jsonl", HEADER, emit=emitted.append)
    for record in mixed_steps(20):
        log.append(record)
    log.close()
    log.close()
    assert len(emitted) == 1
    assert "attention work: causal 60.0%, shared 30.0%, unique 10.0%" in emitted[0]


def test_without_a_path_only_totals_are_kept(tmp_path: Path) -> None:
    emitted: list[str] = []
    log = PhaseLog(None, emit=emitted.append)
    for record in mixed_steps(20):
        log.append(record)
    log.close()
    assert (log.summary.steps, emitted, list(tmp_path.iterdir())) == (20, [], [])
