"""Drafts of a known rate in an engine: made by the host, on the device, or by passes of a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.known_drafts import LOAD_FORMAT, SOURCES, first_wrong, propose_known_drafts
from tests.engine.async_traffic import Watched, params, start
from tests.engine.tiny_models import VOCAB, make_config, make_model
from vllm_gaudi_ucm.observability.phase_log import read_phase_log

pytestmark = pytest.mark.slow  # starts engines

NUM_DRAFTS, REQUESTS, TOKENS, ACCEPTANCE = 4, 6, 90, 0.6
STATIC: dict[str, Any] = {"graphs": {"mode": "eager", "max_graphs": 8, "warm_up": "full"}}
KVSTAR: dict[str, Any] = {
    "ucm_sparse_method": "KVStar",
    "ucm_sparse_config": {"KVStar": {"sparse_ratio": 0.3, "sparse_steps": "always", "min_tokens": 40}},
}
OPTIONS: dict[str, Any] = {
    "load_format": LOAD_FORMAT,
    "skip_tokenizer_init": True,
    "structured_outputs_config": {},
}


class Verified:
    """Counts the drafts that an engine's steps verify, up to the first wrong one of each request."""

    def __init__(self, verification: Any) -> None:
        self.steps, self.right, self.seen = 0, 0, 0
        sample, batch = verification.sample, verification._sampler.batch

        def counted(logits: Any, drafts: Any, grammar: Any) -> Any:
            requests = list(batch.slots)
            sampled = sample(logits, drafts, grammar)
            self.steps += 1
            for request, tokens in zip(requests, sampled.tokens, strict=True):
                offered = len(drafts.tokens.get(request.request_id, ()))
                self.right += len(tokens) - 1
                self.seen += min(offered, len(tokens))
            return sampled

        verification.sample = counted


def records_in_the_gap(parts: Any) -> list[bool]:
    """Of each step from now on, whether the one before was recorded when its forward was queued."""
    found: list[bool] = []
    made = [0, 0]
    records, execution = parts.records, parts.steps.execution
    record, forward = records.report, execution.forward

    def recorded(step: Any) -> None:
        made[0] += 1
        record(step)

    def forwarded() -> None:
        found.append(made[0] >= made[1] > 0)
        made[1] += 1
        forward()

    records.report, execution.forward = recorded, forwarded
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Configurations: the weights are the loader's."""
    folder = tmp_path_factory.mktemp("successors")
    target, draft = (make_config("llama", num_hidden_layers=layers) for layers in (2, 1))
    return make_model(folder / "target", target), make_model(folder / "draft", draft)


@pytest.mark.parametrize(("source", "is_async"), [*((source, True) for source in SOURCES), ("device", False)])
def test_tokens_are_right_and_the_rate_is_as_asked(
    models: tuple[Path, Path], tmp_path: Path, source: str, is_async: bool
) -> None:
    """With asynchronous scheduling each step is scheduled while one runs, and the host waits for its tokens alone."""
    target, draft = models
    log = tmp_path / "log.jsonl"
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    options = {**OPTIONS, "max_num_batched_tokens": 64, "speculative_config": drafts}
    ucm = {**STATIC, **KVSTAR, "phase_log": str(log)}
    prompts = [[3 + 17 * request, *range(40 + request)] for request in range(REQUESTS)]
    with start(target, ucm, is_async=is_async, **options) as engine:
        parts, watched = engine.runner.parts, Watched(engine)
        propose_known_drafts(parts, VOCAB, ACCEPTANCE, source)
        verified, early = Verified(parts.verification), records_in_the_gap(parts)
        outputs = engine.generate(prompts, params(max_tokens=TOKENS))
        for prompt, output in zip(prompts, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            assert len(tokens) == TOKENS
            assert first_wrong(prompt, tokens, VOCAB) is None
        assert (watched.queued > 0.8 * watched.schedules) == is_async
    # what a step was is told when the device has the next one to compute
    assert not is_async or sum(early) < 0.1 * len(early)
    assert verified.seen > 480
    assert verified.right / verified.seen == pytest.approx(ACCEPTANCE, abs=0.08)
    reads = [record.host_reads for record in read_phase_log(log)[1]]
    # of the tokens; the next forward reads drafts on the device
    assert not is_async or set(reads) == {1}


def test_another_rate_takes_the_place_of_the_first(models: tuple[Path, Path]) -> None:
    target, draft = models
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}
    with start(target, {}, is_async=True, **OPTIONS, speculative_config=drafts) as engine:
        parts = engine.runner.parts
        verified = Verified(parts.verification)
        for rate, steps in ((0.0, 19), (1.0, 4)):
            propose_known_drafts(parts, VOCAB, rate, "model")
            before = verified.steps
            engine.generate([[5, 6, 7]], params(max_tokens=21))
            # the first token is the prompt's, and the last step has no room for a draft where none is right
            assert verified.steps - before == steps


def test_no_draft_model_to_spoil(models: tuple[Path, Path]) -> None:
    found = "found NoneType as proposer, expected an engine with a draft model"
    with start(models[0], {}, is_async=False, **OPTIONS) as engine, pytest.raises(TypeError, match=found):
        propose_known_drafts(engine.runner.parts, VOCAB, 0.5, "model")
