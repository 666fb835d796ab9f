"""Engines behind one server that share out a model's experts: each gives the answers of one engine alone, whatever the
others compute meanwhile, and all end together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.reference_model import ReferenceModel
from tests.server.server import HTTP, MODEL_NAME, Server, start_server
from tests.text_model import make_text_model
from vllm_gaudi_ucm.observability.log_file import of_engine
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # starts a server of its own

# of several lengths, so that engines compute prompts beside decodes, in one step or in chunks
PROMPTS = [[(7 * index + count) % 250 + 3 for index in range(count)] for count in (1, 9, 60, 130)]
TOKENS = 12
DIVIDED = ("--data-parallel-size", "2", "--api-server-count", "1")
SMALL = ("--kv-cache-memory-bytes", str(16 << 20), "--max-model-len", "256", "--max-num-batched-tokens", "64")
WHOLE = ("--enable-expert-parallel", "--max-num-seqs", "4")
# parts of six experts at true shapes; two of four experts in buckets
KINDS: list[tuple[str, int, tuple[str, ...], dict[str, Any]]] = [
    ("qwen2_moe", 6, (), {}),
    ("mixtral", 2, WHOLE, {"graphs": {"mode": "eager", "max_graphs": 6}}),
]


def answer(server: Server, engine: int, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    asked = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    header = {"X-data-parallel-rank": str(engine)}
    url = f"{server.url}/v1/completions"
    found = HTTP.post(url, json={**asked, "return_token_ids": True}, headers=header, timeout=60).raise_for_status()
    tokens_found: list[int] = found.json()["choices"][0]["token_ids"]
    return tokens_found


def abort(server: Server, engine: int) -> None:
    """Leaves in the middle of an answer."""
    asked = {"model": MODEL_NAME, "prompt": PROMPTS[2], "max_tokens": 150, "ignore_eos": True, "stream": True}
    header = {"X-data-parallel-rank": str(engine)}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=asked, headers=header, timeout=60) as reply:
        next(reply.iter_lines())


@pytest.mark.parametrize(("family", "experts", "options", "more"), KINDS, ids=[kind[0] for kind in KINDS])
def test_tokens_are_those_of_one_engine(
    smollm2: Path, tmp_path: Path, family: str, experts: int, options: tuple[str, ...], more: dict[str, Any]
) -> None:
    model = make_text_model(smollm2, tmp_path / "model", family)
    reference = ReferenceModel(model)
    expected = [reference.generate(prompt, TOKENS) for prompt in PROMPTS]
    server = start_server(model, tmp_path, *DIVIDED, *SMALL, *options, **more)
    try:
        # the other engine has nothing to compute, and takes part
        for engine in (0, 1):
            assert [answer(server, engine, prompt) for prompt in PROMPTS[1:3]] == expected[1:3], server.log_tail()
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            each = [clients.submit(answer, server, index % 2, prompt) for index, prompt in enumerate(PROMPTS)]
            gone = clients.submit(abort, server, 1)
            assert [one.result() for one in each] == expected, server.log_tail()
            gone.result()
        server.wait_idle()
        assert answer(server, 0, PROMPTS[3]) == expected[3]
        server.terminate()
        assert server.log().count(f"layers of {experts} experts here") == 2
        for engine in (0, 1):
            _, steps = read_phase_log(of_engine(server.phase_log, engine))
            assert sum(step.requests for step in steps) >= 2 * TOKENS
    finally:
        server.kill()
