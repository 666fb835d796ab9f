"""Kept states: a hit ends behind one, and what a step reads is not overwritten in it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from vllm_gaudi_ucm.block_policies.kept_states.kept_states import KeptStates
from vllm_gaudi_ucm.block_policies.policy import Hit
from vllm_gaudi_ucm.vllm_api.scheduling import KVCacheBlocks

SIZE, COUNT, FEW = 4, 3, 2


def hit_of(blocks: int) -> Hit:
    found = KVCacheBlocks(([cast(Any, object()) for _ in range(blocks)],))
    return Hit(found, found, blocks * SIZE, 1000)


class Engine:
    """Requests whose tokens have a prefix in common, and a worker that keeps tokens for states."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.policy = KeptStates(self.requests, SIZE, COUNT, FEW)
        self.kept: dict[int, str] = {}
        self.copies = self.hits = 0

    def step(self, running: dict[str, tuple[str, int, int]]) -> None:
        """running: text of each request, its computed tokens (-1: it begins, with all of its blocks found), and new
        ones.
        """
        self.policy.begin_step()
        scheduled, new = {}, []
        for name, (text, computed, count) in running.items():
            hashes = [text[:end] for end in range(SIZE, len(text) + 1, SIZE)]
            request = self.requests[name] = SimpleNamespace(request_id=name, block_hashes=hashes)
            if computed < 0:
                hit = self.policy.find(cast(Any, None), cast(Any, request), hit_of((len(text) - 1) // SIZE))
                assert [len(group) * SIZE for group in hit.blocks.blocks] == [hit.tokens]
                self.policy.given(
                    cast(Any, SimpleNamespace(begins=True, found=hit.tokens, computed=hit.tokens, request=request))
                )
                computed = hit.tokens
                count = min(count, len(text) - computed)
            scheduled[name] = count
            new.append(SimpleNamespace(req_id=name, num_computed_tokens=computed))
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
        output = SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_new_reqs=new, scheduled_cached_reqs=cached)
        orders = self.policy.orders(cast(Any, output))
        written = [number for *_, number in (*orders["state_copies"], *orders["state_keeps"])]
        assert len(set(written)) == len(written)
        assert set(written) <= set(range(1, COUNT + 1))
        assert not set(written) & set(orders["state_reads"].values())
        computed_of = {request.req_id: request.num_computed_tokens for request in new}
        for name, tokens, number in orders["state_copies"]:
            # the worker has the states behind the last step's tokens
            assert computed_of[name] - FEW < tokens <= computed_of[name]
            self.kept[number] = running[name][0][:tokens]
            self.copies += 1
        for name, number in orders["state_reads"].items():
            assert self.kept[number] == running[name][0][: computed_of[name]]
            self.hits += 1
        for name, tokens, number in orders["state_keeps"]:
            assert computed_of[name] < tokens <= computed_of[name] + scheduled[name]
            assert scheduled[name] > FEW
            self.kept[number] = running[name][0][:tokens]


@given(st.randoms(use_true_random=False))
def test_a_request_reads_the_state_behind_its_tokens(rng: random.Random) -> None:
    engine = Engine()
    for number in range(12):
        running = {}
        for index in range(rng.randrange(1, 4)):
            text = "".join(rng.choice("ab") for _ in range(rng.randrange(3))) + "c" * rng.randrange(1, 14)
            running[f"{number}.{index}"] = (text, -1, rng.randrange(1, 14))
        engine.step(running)
        name = rng.choice(sorted(running))
        text, end = running[name][0], engine.policy._steps[name]
        computed = end.computed + end.rows
        for _ in range(rng.randrange(8)):
            count, accepted = FEW, rng.randrange(1, FEW + 1)
            text = text[:computed].ljust(computed, "c") + "c" * count
            engine.step({name: (text, computed, count)})
            computed += accepted
        engine.policy.ended(engine.requests[name])


def test_a_prompt_that_comes_again_is_found_until_the_cache_is_reset() -> None:
    engine = Engine()
    engine.step({"0": ("a" * 10, -1, 10)})
    engine.step({"1": ("a" * 10, -1, 10)})
    assert engine.hits == 1
    engine.policy.reset()
    engine.step({"2": ("a" * 10, -1, 10)})
    assert engine.hits == 1


def test_a_decode_keeps_the_state_behind_its_last_full_block() -> None:
    """In the place of the one behind the block before, so that long answers leave the states of prompts."""
    engine = Engine()
    for name in ("b", "c"):
        engine.step({name: (name * 4, -1, 4)})
    text = "a" * 40
    engine.step({"0": (text, 6, 1)})
    for computed in range(7, 21):
        engine.step({"0": (text[: computed + 1], computed, 1)})
    assert engine.copies == 4
    assert sorted(engine.kept.values()) == ["a" * 20, "bbbb", "cccc"]
    engine.step({"1": (text, -1, 3)})
    assert engine.hits == 1
