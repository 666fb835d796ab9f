"""A server with a sparse method and drafts: answers, the switch of a request, and /metrics."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.server.conftest import CLIENT_OPTIONS
from tests.server.metrics import read_metrics
from tests.server.server import MODEL_NAME, start_server
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts servers of its own

KVSTAR = {
    "sparse_steps": "always",
    "min_tokens": 128,
    "sparse_ratio": 0.3,
    "min_blocks": 2,
    "local_window_sz": 1,
    "checkpoint_interval": 4,
}
PROMPT = " ".join(f"{number} times two is {2 * number}." for number in range(1, 30))
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'


def test_a_server_with_a_sparse_method(smollm2: Path, tmp_path: Path) -> None:
    """covers: C22 C24 D5"""
    options = ("--block-size", "32", "--speculative-config", NGRAM)
    sparse = {"ucm_sparse_method": "KVStar", "ucm_sparse_config": {"KVStar": KVSTAR}}
    server = start_server(smollm2, tmp_path, *options, **sparse)
    try:
        with OpenAI(base_url=f"{server.url}/v1", **CLIENT_OPTIONS) as client:
            dense = answer(client, False)
            server.wait_idle()
            assert not any(step.sparse for step in read_phase_log(server.phase_log)[1])
            assert answer(client, True)
            with pytest.raises(openai.BadRequestError, match="ucm_sparse"):
                answer(client, "perhaps")
            # the request that was refused took nothing with it
            assert answer(client, False) == dense
            refused_beside_drafts(client)
            assert answer(client, False) == dense
        server.wait_idle()
        steps = read_phase_log(server.phase_log)[1]
        metrics = read_metrics(server)
    finally:
        server.kill()
    assert sum(step.sparse for step in steps) == sum(
        metrics["gaudi_ucm_sparse_selections_total", mode] for mode in ("select", "reuse", "check")
    )
    attended, context = (metrics["gaudi_ucm_sparse_blocks_total", state] for state in ("attended", "context"))
    assert 0 < attended < context
    # counted in the scheduler's process
    assert 0 < metrics["gaudi_ucm_sparse_locks_total", "lock"] <= metrics["gaudi_ucm_sparse_selections_total", "select"]
    # verifications with a choice
    assert any(step.sparse and step.bucket.phase[0] == "c" for step in steps)


def refused_beside_drafts(client: OpenAI) -> None:
    """What vLLM's front end takes from no request while drafts are verified; one that runs meanwhile goes on."""
    stream = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=32, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    for parameter in ({"min_p": 0.1}, {"logit_bias": {"5": 1.0}}):
        with pytest.raises(openai.BadRequestError, match=r"min_p and logit_bias .* speculative decoding") as error:
            client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=2, extra_body=parameter)
        assert error.value.status_code == 400
    assert list(stream)[-1].choices[0].finish_reason == "length"


def answer(client: OpenAI, sparse: object) -> str:
    completion = client.completions.create(
        model=MODEL_NAME,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True, "vllm_xargs": {"ucm_sparse": sparse}},
    )
    return completion.choices[0].text
