"""/metrics of a real server: the plugin's figures stand beside vLLM's, and agree with the phase log."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from openai import OpenAI

from tests.server.metrics import read_metrics
from tests.server.server import MODEL_NAME, Server
from vllm_gaudi_ucm.observability.phase_log import read_phase_log
from vllm_gaudi_ucm.observability.step_record import StepRecord

pytestmark = pytest.mark.skipif(
    not entry_points(group="vllm.stat_logger_plugins", name="gaudi_ucm"),
    reason="installed before the entry point was declared: `make setup` installs again",
)


def test_metrics_agree_with_the_phase_log(server: Server, client: OpenAI) -> None:
    before = read_metrics(server)
    client.completions.create(model=MODEL_NAME, prompt="Metrics count", max_tokens=12, extra_body={"ignore_eos": True})
    server.wait_idle()
    after = read_metrics(server)
    steps = read_phase_log(server.phase_log)[1]
    for phase in ("c--", "--u", "csu"):
        assert after["gaudi_ucm_steps_total", phase] == sum(step.bucket.phase == phase for step in steps)
    for dimension, size in _sizes(steps).items():
        assert after["gaudi_ucm_true_size_total", dimension] == size
        assert after["gaudi_ucm_padded_size_total", dimension] >= size
    assert after["gaudi_ucm_steps_total", "--u"] >= before["gaudi_ucm_steps_total", "--u"] + 11
    forward = sum(step.forward_ms for step in steps) / 1e3
    assert after["gaudi_ucm_step_seconds_total", "forward"] == pytest.approx(forward, rel=1e-3)
    assert ("gaudi_ucm_recipes_after_warm_up_total", "") in after


def _sizes(steps: list[StepRecord]) -> dict[str, int]:
    names = ("query", "shared", "unique", "logits")
    return {name: sum(step.bucket[place] for step in steps) for place, name in enumerate(names, start=1)}
