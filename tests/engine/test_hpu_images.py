"""Pictures on the simulated card: once the buckets and the encoder are warm, no picture compiles anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hpu_counts import BEFORE_BUCKETS, broken_duties, layer_graphs
from tests.engine.hpu_process import run_on_card
from tests.engine.picture_models import PictureReference, make_picture_model, picture, prompt, words
from tests.engine.serving import Answer, Engine, answer_of, greedy_params

pytestmark = pytest.mark.slow  # starts engines on the simulated card

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 3, "video": 0},
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "kv_cache_memory_bytes": 4 << 20,
}
GRAPHS = {"warm_up": "skeleton", "skeleton": 3, "max_graphs": 4}


def asked() -> list[dict[str, Any]]:
    first, second, third = picture(1), picture(2, 50, 20), picture(3, 17, 60)
    return [
        prompt(words(9, 10, 11)),
        prompt(f"w20 <image> {words(30, 31)}", first),
        prompt(f"<image> w9 w10 <image> w40 <image> {words(*range(50, 150))}", second, third, first),
        prompt(f"<image> {words(20, 30)}", first),
        prompt(words(*range(9, 150))),
    ]


def serve(model: str, ucm: dict[str, Any], in_regions: bool, max_model_len: int) -> dict[str, Any]:
    """Answers twice, and what was compiled meanwhile."""
    with Engine(Path(model), ucm, **OPTIONS, max_model_len=max_model_len) as engine:
        from habana_frameworks.torch.simulator import card

        started = dataclasses.asdict(card)
        prompts: list[Any] = asked()
        rounds = [engine.llm.generate(prompts, greedy_params(8), use_tqdm=False) for _ in range(2)]
        return {
            "rounds": [[dataclasses.asdict(answer_of(output)) for output in found] for found in rounds],
            "started": started,
            "card": dataclasses.asdict(card),
            "regions": layer_graphs(engine) if in_regions else {},
            "broken": broken_duties(),
        }


@pytest.mark.parametrize(
    ("family", "lazy"),
    [
        ("llava", False),
        ("llava", True),
        ("gemma3", False),
        ("gemma4", False),
        ("internvl", False),
        ("mistral3", True),
    ],
)
def test_no_picture_compiles_anything(tmp_path: Path, family: str, lazy: bool) -> None:
    pytest.importorskip("torchvision", reason="vLLM's classes of models with pictures import it")
    model = make_picture_model(tmp_path / family, family)
    # Gemma 4 scales every picture to about 70 tokens
    longest = 512 if family == "gemma4" else 256
    options = {"model": str(model), "ucm": {"graphs": GRAPHS}, "in_regions": not lazy, "max_model_len": longest}
    found = run_on_card(serve, tmp_path, lazy=lazy, **options)
    reference = PictureReference(model)
    for answers in found.result["rounds"]:
        reference.assert_greedy(asked(), [Answer(**answer) for answer in answers])
    assert found.result["broken"] == {}
    for count in ("compiled_graphs", "compilations", "captures"):
        assert found.result["card"][count] == found.result["started"][count], count
    if not lazy:
        regions = found.result["regions"]
        assert regions["buckets"] <= regions["graphs"] <= regions["buckets"] + BEFORE_BUCKETS


def test_mistral_3_at_true_shapes(tmp_path: Path) -> None:
    """Its own encoder merges patches by an operator that a Gaudi is not known to have."""
    pytest.importorskip("torchvision", reason="vLLM's classes of models with pictures import it")
    model = make_picture_model(tmp_path / "mistral3", "mistral3")
    ucm = {"graphs": {"mode": "off"}}
    found = run_on_card(serve, tmp_path, model=str(model), ucm=ucm, in_regions=False, max_model_len=256)
    reference = PictureReference(model)
    for answers in found.result["rounds"]:
        reference.assert_greedy(asked(), [Answer(**answer) for answer in answers])
    assert found.result["broken"] == {}
