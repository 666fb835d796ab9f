"""NaN logits are counted, and stop the engine where vLLM's flag asks for it; they never pass for a token unseen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.serving import Engine, greedy_params
from tests.engine.tiny_models import make_config, make_model
from tests.warm_process import WarmProcess, kind_of_device

ROOT = Path(__file__).resolve().parents[2]
BROKEN_TOKEN = 77


def serve_both(model: str) -> None:
    """Prints the tokens of a healthy prompt, then those of a broken one."""
    with Engine(Path(model)) as engine:
        for token in (6, BROKEN_TOKEN):
            print("tokens", engine.greedy([[5, token, 7]], 3)[0].tokens)


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedding of one token is NaN: prompts with it have NaN logits, others do not."""
    folder = make_model(tmp_path_factory.mktemp("broken"), make_config("llama"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN_TOKEN] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_nans_are_counted_for_their_request_only(broken_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """covers: D8"""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    counts: dict[str, int] = {}
    with Engine(broken_model) as engine:
        sample = engine.runner.parts.steps.sample_tokens

        def spy(grammar_output: object) -> object:
            output = sample(grammar_output)  # type: ignore[arg-type]
            counts.update(output.num_nans_in_logits or {})
            return output

        monkeypatch.setattr(engine.runner.parts.steps, "sample_tokens", spy)
        engine.add("healthy", [5, 6, 7], greedy_params(1))
        engine.add("broken", [5, BROKEN_TOKEN, 7], greedy_params(1))
        engine.step()
    by_name = {name.split("-")[0]: count for name, count in counts.items()}
    assert by_name == {"healthy": 0, "broken": 256}


def test_a_healthy_request_is_not_touched_by_a_broken_one(broken_model: Path) -> None:
    """NaN in another request's rows and cache blocks stays there, in the same step and after its blocks are reused."""
    healthy = [[5, 6, 7], [9] * 40]
    with Engine(broken_model, enable_prefix_caching=False, num_gpu_blocks_override=33) as engine:
        alone = engine.alone(healthy, 20)
        broken = [5, BROKEN_TOKEN, *range(3, 70)]
        together = engine.greedy([healthy[0], broken, healthy[1], broken], 20)
        again = engine.alone(healthy, 20)
    assert [together[0].tokens, together[2].tokens] == [answer.tokens for answer in alone]
    assert [answer.tokens for answer in again] == [answer.tokens for answer in alone]
    assert all(torch.isfinite(torch.tensor(answer.logprobs)).all() for answer in again)


@pytest.mark.slow  # a process of its own
def test_the_fail_fast_flag_stops_the_engine(broken_model: Path, tmp_path: Path) -> None:
    """covers: D8"""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_RAISE_ON_LOGIT_NANS": "1",
        "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    }
    log = tmp_path / "log"
    process = WarmProcess(serve_both, (str(broken_model),), log=log, env=environment, cwd=ROOT, kind=kind_of_device())
    assert process.finish(240) != 0
    text = log.read_text()
    printed = [line for line in text.splitlines() if line.startswith("tokens")]
    assert len(printed) == 1, "the healthy prompt is served, the broken one is not"
    assert "NaN" in text
