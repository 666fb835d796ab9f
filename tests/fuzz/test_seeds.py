"""Ten random engines, and a seed that hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.seeds import SeedProcesses

pytestmark = pytest.mark.slow  # starts engines in processes

SEEDS = range(1, 11)
SECONDS = 240.0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_engine_serves_random_requests(seed: int, smollm2: Path) -> None:
    """covers: A1 A3 A6 A7 A8. More of them: `make fuzz SEEDS=11..100`."""
    outcome = SeedProcesses(SECONDS).run(seed)
    assert outcome.passed, "\n".join([outcome.line(), *outcome.report({})])
    assert outcome.steps
    assert outcome.tokens


def test_a_seed_that_hangs_is_one_failure(tmp_path: Path) -> None:
    outcome = SeedProcesses(0.2, logs=tmp_path).run(1)
    assert "no end within 0 s" in outcome.problems[0]
    assert (tmp_path / "seed-1.log").exists()
