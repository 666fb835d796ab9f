"""Sampling on the simulated card in compile mode: regions, the tokens of the cpu device, and every wait counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Engine

pytestmark = pytest.mark.slow  # starts engines on the simulated card

PROMPTS = [list(range(3, 3 + length)) for length in (5, 20, 1)]
OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "kv_cache_memory_bytes": 4 << 20,
    "max_logprobs": 5,
}
GRAPHS = {"warm_up": "full", "max_graphs": 5}

# Of one greedy or random row per request; each is a batch of its own, and nothing of it runs on the host.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    # one token is left, whatever the noise
    "top-k": {"temperature": 0.9, "top_k": 1},
    "top-p": {"temperature": 0.9, "top_p": 1e-6},
    "min-p": {"temperature": 0.9, "min_p": 1.0},
    "seed": {"temperature": 1.0, "seed": 7},
    "seed and top-p": {"temperature": 1.3, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.2},
    "random": {"temperature": 1.0},
    "logit bias": {"temperature": 0.0, "logit_bias": {5: 40.0, 6: -100.0}, "presence_penalty": 1.0},
    "allowed tokens": {"temperature": 0.0, "allowed_token_ids": [5, 9, 31, 32, 64]},
    "min tokens": {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": list(range(0, 128, 2))},
}
REFUSED_BESIDE_DRAFTS = {"min-p", "logit bias"}  # by vLLM


def steps(engine: Engine, params: dict[str, Any], reads: Any = lambda: 0) -> tuple[list[list[int]], list[int]]:
    """Tokens of each prompt, and the host reads of each step."""
    ids = [engine.new_id() for _ in PROMPTS]
    for name, prompt in zip(ids, PROMPTS, strict=True):
        engine.add(name, prompt, SamplingParams(**params, max_tokens=6, ignore_eos=True, detokenize=False))
    tokens: dict[str, list[int]] = {}
    counted = []
    while len(tokens) < len(ids):
        before = reads()
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        counted.append(reads() - before)
    return [tokens[name] for name in ids], counted


def sample_all(model: str, log: str, ucm: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """In a process with the card: tokens and reads of each case, and the card's counts after start and in the end."""
    with Engine(Path(model), {"graphs": GRAPHS, "phase_log": log, **ucm}, **options) as engine:
        from habana_frameworks.torch.simulator import card

        names = ("compiled_graphs", "compilations", "eager_fallbacks", "copied_bytes")
        started = {name: getattr(card, name) for name in names}
        refused = REFUSED_BESIDE_DRAFTS if "speculative_config" in options else set()
        cases = [name for name in CASES if name not in refused]
        found = {name: steps(engine, CASES[name], lambda: card.host_reads) for name in cases}
        return {"found": found, "started": started, "ended": {name: getattr(card, name) for name in names}}


def records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()[1:]]


def test_sampling_in_regions(tiny_llama: Path, tmp_path: Path) -> None:
    """A steady greedy decode step reads the card once; nothing is compiled once warm, nothing falls back or copies."""
    log = tmp_path / "phases.jsonl"
    run = run_on_card(sample_all, tmp_path, model=str(tiny_llama), log=str(log), ucm={}, options=OPTIONS)
    assert run.result["ended"] == run.result["started"]
    found = run.result["found"]
    with Engine(tiny_llama, **OPTIONS) as engine:
        for name, params in CASES.items():
            assert found[name][0] == steps(engine, params)[0], name
    assert set(found["greedy"][1]) == {1}
    assert set(found["logprobs"][1]) == {2}
    lines = records(log)
    assert [line["host_reads"] for line in lines] == [reads for _, counted in found.values() for reads in counted]
    assert not {name for line in lines for name in line.get("host_stages", ())}


DRAFTED: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_in_regions(method: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Verification reads the card once for each position, a draft model once for each pass."""
    drafts = DRAFTED.get(method) or {"method": method, "model": str(tiny_llama), "num_speculative_tokens": 2}
    options = {**OPTIONS, "speculative_config": drafts}
    log = tmp_path / "phases.jsonl"
    run = run_on_card(sample_all, tmp_path, model=str(tiny_llama), log=str(log), ucm={}, options=options)
    assert run.result["ended"] == run.result["started"]
    found = run.result["found"]
    with Engine(tiny_llama, **OPTIONS) as engine:
        for name in found:
            assert found[name][0] == steps(engine, CASES[name])[0], name
    lines = records(log)
    assert [line["host_reads"] for line in lines] == [reads for _, counted in found.values() for reads in counted]
    stages = {name for line in lines for name in line.get("host_stages", ())}
    assert stages == {"acceptance of drafts", *(["drafts by n-grams"] if method == "ngram" else [])}
