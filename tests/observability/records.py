"""Made-up steps for the tests of the phase log and of what reads it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.observability.phase_log import PhaseLog
from vllm_gaudi_ucm.observability.step_record import StepRecord

HEADER = {"model": "models/tiny", "block_size": 16, "max_num_seqs": 8}


def step(index: int, phase: str = "csu", ms: float = 10.0, pairs: tuple[int, int, int] = (6, 3, 1)) -> StepRecord:
    """A step of `phase` that took `ms` milliseconds, a tenth of it planning."""
    bucket = Bucket(phase, 40, 2, 5, 3)
    causal, shared, unique = pairs
    return StepRecord(index, bucket, bucket, 3, 1, 40, causal, shared, unique, ms * 0.1, ms * 0.8, ms * 0.1)


def tail_step(index: int) -> StepRecord:
    """A step that ran in a graph for prompt remainders; no bucket without selected blocks holds it."""
    return replace(
        step(index), bucket=Bucket("cs-", 12, 3, 0, 1, 9), padded=Bucket("cs-", 16, 4, 0, 1, 20), prompt_remainder=1
    )


def mixed_steps(count: int = 200, seed: int = 7) -> list[StepRecord]:
    """Steps of several phases with different costs."""
    rng = random.Random(seed)
    phases = rng.choices(["--u", "-su", "c-u", "csu", "c--"], [10, 5, 3, 2, 1], k=count)
    return [step(index, phase, ms=rng.uniform(5, 50)) for index, phase in enumerate(phases)]


def write_log(path: Path, records: list[StepRecord]) -> None:
    """A finished log with `records`."""
    log = PhaseLog(path, HEADER)
    for record in records:
        log.append(record)
    log.close()
