"""Requests that end early leave nothing behind and change nobody else's tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.serving import Engine, greedy_params
from tests.engine.tiny_models import VOCAB


def _prompt(rng: random.Random, longest: int = 150) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, longest))]


@pytest.mark.usefixtures("contract")
@pytest.mark.parametrize("blocks", [34, 400])
def test_aborts_at_any_moment(tiny_llama: Path, blocks: int) -> None:
    """While waiting, in a chunk, while decoding, while preempted, before any block. covers: A7"""
    rng = random.Random(8)
    kept = [_prompt(rng) for _ in range(8)]
    with Engine(tiny_llama) as engine:
        expected = [answer.tokens for answer in engine.alone(kept, 40)]
    with Engine(tiny_llama, num_gpu_blocks_override=blocks, max_num_batched_tokens=48, max_num_seqs=6) as engine:
        live: list[str] = []
        names = {}
        finished: dict[str, list[int]] = {}
        for step in range(400):
            if step % 6 == 0 and len(names) < len(kept):
                name = engine.new_id()
                names[name] = len(names)
                engine.add(name, kept[names[name]], greedy_params(40))
            if rng.random() < 0.5 and step < 150:
                live.append(engine.new_id())
                engine.add(live[-1], _prompt(rng), greedy_params(60))
            if live and (rng.random() < 0.5 or step > 200):
                gone = live.pop(rng.randrange(len(live)))
                engine.llm.llm_engine.abort_request([gone], internal=False)
            for output in engine.step():
                if output.finished and output.request_id in names:
                    finished[output.request_id] = list(output.outputs[0].token_ids)
            if step > 200 and not engine.llm.llm_engine.has_unfinished_requests():
                break
        assert not engine.llm.llm_engine.has_unfinished_requests()
        engine.step()
        engine.check_idle()
        assert blocks > 100 or engine.preemptions > 0
        assert {names[name]: tokens for name, tokens in finished.items()} == dict(enumerate(expected))


def test_a_reused_id_is_another_request(tiny_llama: Path) -> None:
    """covers: D7"""
    rng = random.Random(2)
    first, second = _prompt(rng), _prompt(rng)
    with Engine(tiny_llama) as engine:
        expected = engine.alone([second], 12)[0].tokens
        engine.add("same", first, greedy_params(50))
        for _ in range(4):
            engine.step()
        engine.llm.llm_engine.abort_request(["same"], internal=False)
        engine.add("same", second, greedy_params(12))
        outputs = []
        while engine.llm.llm_engine.has_unfinished_requests():
            outputs += engine.step()
        assert list(outputs[-1].outputs[0].token_ids) == expected
        engine.check_idle()
