"""Sampling on the simulated card in compile mode: regions, the tokens of the cpu device, and every wait counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

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
    "seed": {"temperature": 1.0, "seed": 7},
    "seed and top-p": {"temperature": 1.3, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.2},
    "random": {"temperature": 1.0},
    "allowed tokens": {"temperature": 0.0, "allowed_token_ids": [5, 9, 31, 32, 64]},
    "min tokens": {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": list(range(0, 128, 2))},
    # refused by vLLM beside drafts: last, as what is drawn without a seed depends on what was drawn before
    "min-p": {"temperature": 0.9, "min_p": 1.0},
    "logit bias": {"temperature": 0.0, "logit_bias": {5: 40.0, 6: -100.0}, "presence_penalty": 1.0},
}
REFUSED_BESIDE_DRAFTS = {"min-p", "logit bias"}


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


DRAFTED: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 2},
}


def sample_all(model: str, logs: str, options: dict[str, Any]) -> dict[str, Any]:
    """In a process with the card, without drafts and with each kind of them: tokens and reads of each case, and the
    card's counts after start and in the end."""
    from habana_frameworks.torch.simulator import card

    names = ("compiled_graphs", "compilations", "eager_fallbacks", "copied_bytes")
    runs = {}
    for kind, drafts in DRAFTED.items():
        if kind == "draft_model":
            drafts = {**drafts, "model": model}
        given = {**options, "speculative_config": drafts} if drafts else options
        with Engine(Path(model), {"graphs": GRAPHS, "phase_log": f"{logs}/{kind}.jsonl"}, **given) as engine:
            started = {name: getattr(card, name) for name in names}
            cases = [name for name in CASES if not drafts or name not in REFUSED_BESIDE_DRAFTS]
            found = {name: steps(engine, CASES[name], lambda: card.host_reads) for name in cases}
        runs[kind] = {"found": found, "started": started, "ended": {name: getattr(card, name) for name in names}}
    return runs


class Sampled(NamedTuple):
    """Of one engine on the card: tokens and host reads of each case, and the lines of its phase log."""

    found: dict[str, Any]
    lines: list[dict[str, Any]]


@pytest.fixture(scope="module")
def wanted(tiny_llama: Path) -> dict[str, list[list[int]]]:
    """Tokens of each case on the cpu device."""
    with Engine(tiny_llama, **OPTIONS) as engine:
        return {name: steps(engine, params)[0] for name, params in CASES.items()}


@pytest.fixture(scope="module")
def sampled(
    tiny_llama: Path, wanted: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Sampled]:
    """Of each engine. Nothing is compiled once warm, nothing falls back or copies; tokens are those of the cpu device,
    and the phase log counts the card's reads."""
    logs = tmp_path_factory.mktemp("sampling")
    runs = run_on_card(sample_all, logs, model=str(tiny_llama), logs=str(logs), options=OPTIONS).result
    found = {}
    for kind, run in runs.items():
        assert run["ended"] == run["started"], kind
        assert {name: tokens for name, (tokens, _) in run["found"].items()} == {
            name: wanted[name] for name in run["found"]
        }
        lines = [json.loads(line) for line in (logs / f"{kind}.jsonl").read_text().splitlines()[1:]]
        assert [line["host_reads"] for line in lines] == [
            reads for _, counted in run["found"].values() for reads in counted
        ]
        found[kind] = Sampled(run["found"], lines)
    return found


def test_sampling_in_regions(sampled: dict[str, Sampled]) -> None:
    """A steady greedy decode step reads the card once."""
    found, lines = sampled["none"]
    assert set(found) == set(CASES)
    assert set(found["greedy"][1]) == {1}
    assert set(found["logprobs"][1]) == {2}
    assert not {name for line in lines for name in line.get("host_stages", ())}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_in_regions(method: str, sampled: dict[str, Sampled]) -> None:
    """Verification reads the card once for each position, a draft model once for each pass."""
    found, lines = sampled[method]
    assert set(found) == set(CASES) - REFUSED_BESIDE_DRAFTS
    stages = {name for line in lines for name in line.get("host_stages", ())}
    assert stages == {"acceptance of drafts", *(["drafts by n-grams"] if method == "ngram" else [])}
