"""Warm-up on the simulated card: with the skeleton alone, and in idle gaps, no request waits for a compilation."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.hpu_process import Finished, run_on_card
from tests.engine.serving import Engine
from tests.engine.texts import SHORT
from tests.engine.tiny_models import VOCAB

# starts engines on the simulated card
pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 100,
}
PROMPTS = [[(7 * index + 3 * length) % (VOCAB - 3) + 3 for index in range(length)] for length in (1, 2, 16, 33, 120)]
PROMPTS += [[*PROMPTS[-1][:64], 5, 6, 7], [*PROMPTS[-1][:64], 9]]
# One prompt for each; `choice` and `regex` are grammars.
ASKED: list[dict[str, Any]] = [
    {},
    {"regex": r"[A-Z]{3}-\d{4}"},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"choice": ["positive", "negative"], "logprobs": 2},
    {"repetition_penalty": 1.6, "logprobs": 5},
    {"temperature": 1.0, "seed": 7, "top_k": 20},
]
ROUNDS = 3
MAX_GRAPHS, SKELETON = 11, 2
GAP = 2.0
IDLE = {"warm_up": "idle", "max_graphs": MAX_GRAPHS, "skeleton": SKELETON}
THREAD = "ucm-warm-up"


def sampling(asked: dict[str, Any]) -> SamplingParams:
    grammar = {key: value for key, value in asked.items() if key in ("regex", "choice")}
    others = {key: value for key, value in asked.items() if key not in grammar}
    outputs = StructuredOutputsParams(**grammar) if grammar else None
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 9, **others}, structured_outputs=outputs)


def found_in(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens, reason of the end, and how many logprobs each token came with."""
    answers = [output.outputs[0] for output in outputs]
    return [
        [list(answer.token_ids), answer.finish_reason, [len(scores) for scores in answer.logprobs or []]]
        for answer in answers
    ]


def serve_mixed(model: str, ucm: dict[str, Any]) -> list[list[Any]]:
    """Rounds of requests with every kind of sampling, in changing company."""
    options = {**OPTIONS, "skip_tokenizer_init": False, "structured_outputs_config": {"backend": "xgrammar"}}
    prompts = [SHORT[index % len(SHORT)] for index in range(len(ASKED))]
    params = [sampling(asked) for asked in ASKED]
    with Engine(Path(model), ucm, **options) as engine:
        started = _compilations()
        rounds = []
        for number in range(ROUNDS):
            chosen = range(number % 2, len(ASKED), number + 1)
            outputs = engine.generate([prompts[index] for index in chosen], [params[index] for index in chosen])
            rounds.append(found_in(outputs))
        static = engine.runner.static
        cold = 0 if static is None else len(static.execution.ready.cold)
        return [rounds, cold, _compilations() - started]


class StepWatch:
    """Counts what the card compiles between the begin and the end of steps, and around the skeleton's warm-up."""

    def __init__(self) -> None:
        from vllm_gaudi_ucm.runner.static_shapes import StaticShapes

        self.in_steps = 0
        self._begun = 0
        warm_up, begin, end = StaticShapes.warm_up, StaticShapes.begin_step, StaticShapes.end_step

        def warmed(static: StaticShapes) -> float:
            self.before = _compiling_us()
            seconds = warm_up(static)
            self.skeleton = _compiling_us() - self.before
            return seconds

        def begun(static: StaticShapes) -> None:
            begin(static)
            self._begun = _compilations()

        def ended(static: StaticShapes) -> None:
            self.in_steps += _compilations() - self._begun
            end(static)

        StaticShapes.warm_up = warmed  # type: ignore[method-assign]
        StaticShapes.begin_step = begun  # type: ignore[method-assign]
        StaticShapes.end_step = ended  # type: ignore[method-assign]


def serve_in_gaps(model: str) -> dict[str, Any]:
    """Bursts of requests while `MAX_GRAPHS` graphs are warmed in the gaps between them."""
    watch = StepWatch()
    with Engine(Path(model), {"graphs": IDLE}, **OPTIONS) as engine:
        static = engine.runner.static
        assert static is not None
        bursts, cold = [], []
        end = time.monotonic() + 200
        while time.monotonic() < end:
            cold.append(len(static.execution.ready.cold))
            bursts.append([answer.tokens for answer in engine.greedy(PROMPTS, 3)])
            if cold[-1] == 0:
                break
            time.sleep(GAP)
        series = static._metrics._recipes
        return {
            "bursts": bursts,
            "cold": cold,
            "in_steps": watch.in_steps,
            "recipes_metric": series._cells[series._index],
            "skeleton_us": watch.skeleton,
            "full_us": _compiling_us() - watch.before,
            "states": [record.state for record in static.summary().records],
        }


def shut_down_early(model: str) -> dict[str, Any]:
    """An engine that is still warming when it ends."""
    with Engine(Path(model), {"graphs": IDLE}, **OPTIONS) as engine:
        static = engine.runner.static
        assert static is not None
        warming = any(thread.name == THREAD for thread in threading.enumerate())
    cold = static.execution.ready.cold
    after = any(thread.name == THREAD for thread in threading.enumerate())
    time.sleep(0.5)
    return {"warming": warming, "after": after, "cold": len(cold), "still": static.execution.ready.cold == cold}


SKELETON_ALONE = {"graphs": {"warm_up": "skeleton", "max_graphs": 24}}


def start_and_serve(model: str, text_model: str) -> dict[str, Any]:
    """All of them, in one process."""
    mixed = serve_mixed(text_model, SKELETON_ALONE)
    return {"mixed": mixed, "gaps": serve_in_gaps(model), "early": shut_down_early(model)}


def _compiling_us() -> int:
    from habana_frameworks.torch.simulator import card

    return int(card.compiling_us())


def _compilations() -> int:
    """Of the card; on the cpu device there is none."""
    try:
        from habana_frameworks.torch.simulator import card
    except ImportError:
        return 0
    return int(card.compilations)


@pytest.fixture(scope="module")
def served(tiny_llama: Path, tiny_text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    models = {"model": str(tiny_llama), "text_model": str(tiny_text_model)}
    return run_on_card(start_and_serve, tmp_path_factory.mktemp("idle"), **models)


def test_the_skeleton_alone_serves_everything(served: Finished, tiny_text_model: Path) -> None:
    """Same tokens as on the cpu device, whatever is asked of the sampler, and nothing is compiled. covers: B1 B5 B6"""
    wanted, _, _ = serve_mixed(str(tiny_text_model), {})
    rounds, cold, compilations = served.result["mixed"]
    assert rounds == wanted
    assert cold > 16
    assert compilations == 0


def test_requests_never_wait_for_the_rest(served: Finished, tiny_llama: Path) -> None:
    """Bursts with gaps: graphs become warm in the gaps alone, and the answers stay the cpu device's. covers: B6"""
    found = served.result["gaps"]
    with Engine(tiny_llama, **OPTIONS) as engine:
        wanted = [answer.tokens for answer in engine.greedy(PROMPTS, 3)]
    assert found["bursts"] == [wanted] * len(found["bursts"])
    assert len(found["bursts"]) >= 3
    assert found["cold"] == sorted(found["cold"], reverse=True)
    assert found["cold"][0] > MAX_GRAPHS - 10
    assert found["cold"][-1] == 0
    assert set(found["states"]) == {"warm"}
    assert found["in_steps"] == 0
    assert found["recipes_metric"] == 0
    assert "recipes in a step, after warm-up" not in served.log


def test_serving_starts_long_before_the_end_of_the_warm_up(served: Finished) -> None:
    """After 3 of 11 graphs, and what is compiled once for all; of 64 graphs it is a tenth. covers: B6"""
    found = served.result["gaps"]
    assert 0 < found["skeleton_us"] <= 0.35 * found["full_us"]


def test_an_engine_that_ends_early_stops_its_warm_up(served: Finished) -> None:
    found = served.result["early"]
    assert found["warming"]
    assert not found["after"]
    assert found["still"]
    assert found["cold"] > MAX_GRAPHS - 10
