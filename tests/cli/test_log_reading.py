"""Phase logs as commands read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observability.records import mixed_steps, write_log
from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm_tools.phases import phases


@pytest.mark.parametrize("least", [0, 1 << 30])
def test_a_bar_is_shown_while_a_long_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], least: int
) -> None:
    monkeypatch.setattr(phases, "LONG_BYTES", least)
    path = tmp_path / "phases.jsonl"
    write_log(path, mixed_steps(20))
    assert cli.main(["phases", str(path), "--json"]) == 0
    shown = capsys.readouterr()
    assert '"steps": 20' in shown.out
    assert ("reading" in shown.err and "100%" in shown.err) == (least == 0)
