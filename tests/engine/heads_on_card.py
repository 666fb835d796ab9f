"""Runs draft heads on the simulated card, and compares their tokens and what they compile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.engine.draft_load import MAX_TOKENS, OPTIONS, PROMPTS
from tests.engine.head_models import Pair
from tests.engine.hpu_counts import broken_duties
from tests.engine.hpu_process import run_on_card
from tests.engine.serving import Engine

NUM_DRAFTS = 3
_PROMPTS = PROMPTS[:5]


def _on_card(pairs: dict[str, list[str | None]], mode: str) -> dict[str, Any]:
    """Returns what engines of a simulated card answer with each head, and what they compile after the warm-up. Drafts
    are random for the requests that sample.

    pairs: method, target and head by the name of each.
    """
    from habana_frameworks.torch.simulator import card

    options = {**OPTIONS, "dtype": "float32", "max_num_seqs": 4}
    ucm = {"graphs": {"mode": mode, "warm_up": "full", "max_graphs": 6, "max_shared_blocks": 16}}
    found: dict[str, Any] = {}
    for name, (method, target, head) in pairs.items():
        assert method is not None
        assert target is not None
        pair = Pair(method, Path(target), None if head is None else Path(head))
        speculation = {**pair.speculation(NUM_DRAFTS), "draft_sample_method": "probabilistic"}
        with Engine(pair.target, ucm, **options, speculative_config=speculation) as engine:
            warm = [card.compilations, card.captures, card.bypasses]
            answers = [answer.tokens for answer in engine.greedy(_PROMPTS, MAX_TOKENS)]
            for top_k in (0, 5):
                sampled = SamplingParams(temperature=0.8, top_k=top_k, max_tokens=8, ignore_eos=True)
                engine.generate(_PROMPTS, sampled)
            served = [card.compilations, card.captures, card.bypasses]
        found[name] = {"answers": answers, "warm": warm, "served": served}
    return {"heads": found, "broken": broken_duties()}


def check_on_card(pairs: Mapping[str, Pair], folder: Path, mode: str) -> None:
    """Checks that engines of a simulated card give the tokens of a CPU without drafts, and compile nothing once warm.

    mode: of graphs: `capture` or `compile`.
    """
    named = {name: [pair.method, str(pair.target), pair.head and str(pair.head)] for name, pair in pairs.items()}
    found = run_on_card(_on_card, folder, lazy=mode == "capture", pairs=named, mode=mode).result
    for name, one in found["heads"].items():
        with Engine(pairs[name].target, **OPTIONS) as engine:
            assert one["answers"] == [answer.tokens for answer in engine.greedy(_PROMPTS, MAX_TOKENS)]
        assert one["served"] == one["warm"]
    assert found["broken"] == {}
