"""Output that is not UTF-8: commands end as their work did, and the log has every line."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.observability.records import mixed_steps, write_log
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.phase_summary import PhaseSummary, summary_text

ENCODINGS = ("ascii", "latin-1", "cp1252")


def stream(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


def written(output: io.TextIOWrapper) -> str:
    output.flush()
    assert isinstance(output.buffer, io.BytesIO)
    return output.buffer.getvalue().decode(output.encoding)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(40))
    return path


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_commands_with_bars_and_tables(log: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    trace = ["trace", "--mix", "chat", "--steps", "30", "-o", str(log.with_name("trace.jsonl"))]
    for command in (["phases", str(log)], trace, ["op-cost", "--batch", "decode"], ["config"]):
        out, err = stream(encoding), stream(encoding)
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        assert cli.main(command) == 0, written(err)
        assert "?" not in written(out).replace("?)", ""), "a character without a look-alike"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_error_with_the_name_of_a_file(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    out, err = stream(encoding), stream(encoding)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    assert cli.main(["phases", "no-\u65e5\u672c.jsonl"]) == 2
    assert "no-??.jsonl" in written(err)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> list[logging.LogRecord]:
    """Records that a handler could not write."""
    found: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.StreamHandler, "handleError", lambda self, record: found.append(record))
    return found


@pytest.fixture
def output(request: pytest.FixtureRequest) -> Iterator[io.TextIOWrapper]:
    """Where vLLM's logger writes, in the encoding of the test."""
    handler = logging.StreamHandler(stream(request.param))
    logging.getLogger("vllm").addHandler(handler)
    yield handler.stream
    logging.getLogger("vllm").removeHandler(handler)


@pytest.mark.parametrize("output", ENCODINGS, indirect=True)
def test_every_line_of_the_log(faults: list[logging.LogRecord], output: io.TextIOWrapper) -> None:
    summary = PhaseSummary()
    for step in mixed_steps(40):
        summary.add(step)
    logger = plugin_logger("vllm_gaudi_ucm.tests.encodings")
    logger.warning("%s", summary_text(summary))
    logger.warning("no folder /caf\u00e9 and no /\u65e5\u672c: %d", 3)
    assert not faults
    lines = written(output).splitlines()
    assert any(line and not line.strip(" -") for line in lines), "the rule of the table"
    cafe = "caf?" if output.encoding == "ascii" else "caf\u00e9"
    assert lines[-1] == f"no folder /{cafe} and no /??: 3"


@pytest.mark.parametrize("output", ["utf-8"], indirect=True)
def test_a_log_in_utf8_is_as_it_is(faults: list[logging.LogRecord], output: io.TextIOWrapper) -> None:
    plugin_logger("vllm_gaudi_ucm.tests.encodings").warning("\u2588 caf\u00e9")
    assert not faults
    assert written(output) == "\u2588 caf\u00e9\n"
