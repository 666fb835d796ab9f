"""Reads our own phase log: steps of a flat batch, as the prefills and decodes that vllm-gaudi would run instead."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vllm_gaudi_ucm.observability.phase_log import PhaseLogReader
from vllm_gaudi_ucm.observability.step_record import StepRecord
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Prefill, Step, Traffic, TrafficError

LIMITS = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "num_blocks")
ASSUMPTIONS = (
    "prompts of a step are equally long, and have equal contexts",
    "half of a decode's last block is in use",
    "decodes of a step with prompts have the mean context of the decodes before them",
)


def known_limits(path: Path) -> dict[str, int]:
    """Returns the limits of the log's first line."""
    with PhaseLogReader(path) as log:
        return {name: log.header[name] for name in LIMITS if type(log.header.get(name)) is int}


def traffic(path: Path, settings: Settings) -> Traffic:
    """Returns the steps of a log.

    Raises:
        TrafficError: settings that it cannot tell the steps of.
    """
    if settings.drafts or settings.ranks > 1 or settings.contiguous:
        raise TrafficError(
            f"{path}: a phase log says neither block ids nor drafts nor what other ranks computed; leave "
            "--num-speculative-tokens, --data-parallel-size and contiguous reading out, or give a log of requests"
        )
    with PhaseLogReader(path) as log:
        steps = [(step,) for step in _steps(log.steps(), settings)]
    return Traffic(f"{path} (phase log)", steps, ASSUMPTIONS)


def _steps(records: Iterable[StepRecord], settings: Settings) -> Iterable[Step]:
    mean = float(settings.block_size)
    for record in records:
        decodes = record.requests - record.prompts
        pairs = record.shared_pairs + record.unique_pairs + record.selected_pairs
        if not record.prompts and decodes:
            mean = pairs / decodes
        yield Step(
            tuple(_prefills(record, pairs - decodes * mean, settings)), decodes, _blocks(decodes, mean, settings)
        )


def _blocks(decodes: int, mean: float, settings: Settings) -> int:
    blocks = round(decodes * (mean / settings.block_size + 0.5))
    return min(max(decodes, blocks), decodes * settings.blocks_per_request)


def _prefills(record: StepRecord, pairs: float, settings: Settings) -> Iterable[Prefill]:
    """Yields the prompts of a step. pairs: products of their tokens and the tokens of their contexts."""
    if not record.prompts:
        return
    rows = max(record.prompts, record.bucket.query_len - (record.requests - record.prompts))
    query = -(-rows // record.prompts)
    computed = min(max(0, round(pairs / rows)), settings.max_model_len - query)
    for _ in range(record.prompts):
        yield Prefill(query, max(0, computed))
