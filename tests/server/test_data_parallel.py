"""Two engines behind one server: each gives the answers of one engine alone, and has its own figures and log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.reference_model import ReferenceModel
from tests.server.conftest import CLIENT_OPTIONS
from tests.server.server import HTTP, MODEL_NAME, Server, start_server
from vllm_gaudi_ucm.observability.log_file import of_engine
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts a server of its own

PROMPTS = [[(7 * index) % 250 + 3 for index in range(count)] for count in (5, 60, 130)]
TOKENS = 12
DIVIDED = ("--data-parallel-size", "2", "--api-server-count", "1")
SMALL = ("--kv-cache-memory-bytes", str(16 << 20), "--max-model-len", "256")


@pytest.fixture(scope="module")
def expected(tiny_text_model: Path) -> list[list[int]]:
    """The tokens of Transformers."""
    reference = ReferenceModel(tiny_text_model)
    return [reference.generate(prompt, TOKENS) for prompt in PROMPTS]


def answers(server: Server, engine: int) -> list[list[int]]:
    """Tokens of each prompt, by one of the engines."""
    more: Any = {"extra_headers": {"X-data-parallel-rank": str(engine)}, "temperature": 0, "max_tokens": TOKENS}
    more["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    with OpenAI(base_url=f"{server.url}/v1", **CLIENT_OPTIONS) as client:
        found: Any = [client.completions.create(model=MODEL_NAME, prompt=prompt, **more) for prompt in PROMPTS]
    return [completion.choices[0].model_extra["token_ids"] for completion in found]


def decodes(server: Server) -> dict[str, float]:
    """Steps of decodes alone, by engine."""
    text = HTTP.get(f"{server.url}/metrics", timeout=30).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    steps = [sample for sample in samples if sample.name == "gaudi_ucm_steps_total"]
    return {sample.labels["engine"]: sample.value for sample in steps if sample.labels["phase"] == "--u"}


def test_each_engine_answers_like_one_alone(tiny_text_model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    server = start_server(tiny_text_model, tmp_path, *DIVIDED, *SMALL)
    try:
        assert [answers(server, engine) for engine in (0, 1)] == [expected] * 2
        assert decodes(server) == {engine: len(PROMPTS) * (TOKENS - 1) for engine in ("0", "1")}
        server.terminate()
        for number in (0, 1):
            _, steps = read_phase_log(of_engine(server.phase_log, number))
            assert sum(step.bucket.phase == "--u" for step in steps) == len(PROMPTS) * (TOKENS - 1)
    finally:
        server.kill()


@pytest.mark.timeout(400)  # four workers
def test_each_engine_has_workers_of_its_own(tiny_text_model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """Two engines of two workers each."""
    workers = ("--tensor-parallel-size", "2")
    server = start_server(tiny_text_model, tmp_path, *DIVIDED, *workers, *SMALL, distributed={"check_ranks": True})
    try:
        assert [answers(server, engine) for engine in (0, 1)] == [expected] * 2
        assert decodes(server) == {engine: len(PROMPTS) * (TOKENS - 1) for engine in ("0", "1")}
    finally:
        server.kill()
