"""Sampling at static shapes gives what vLLM's sampler gives, in recipes that warm-up has seen."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from tests.sampling.sampling_twins import (
    MAX_MODEL_LEN,
    MAX_ROWS,
    MODES,
    VOCAB,
    WIDTH,
    Twins,
    assert_same,
    engine_config,
    poisoned_logits,
    random_grammar,
)
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.ops.likeliest_tokens import likeliest_tokens
from vllm_gaudi_ucm.sampling.stages.token_mask import mask_logits
from vllm_gaudi_ucm.sampling.static_sampling import StaticSampler
from vllm_gaudi_ucm_tools.recipes.recorder import RecipeRecorder

SEEDS = st.integers(0, 1 << 30)


def device_params(rng: random.Random, temperatures: tuple[float, ...]) -> SamplingParams:
    """Any mix of what the device samples."""
    params = SamplingParams(
        temperature=rng.choice(temperatures),
        top_k=rng.choice([0, 0, 1, 5, 100]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.1, 0.4]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, -1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.8]),
        logprobs=rng.choice([None, None, 0, 3, WIDTH]),
        seed=rng.choice([None, 7, -(1 << 62)]),
        logit_bias=rng.choice([None, None, {4: 9.0, 5: -100.0}, {0: 3.0, 69: -2.0, 7: 1.0}]),
        min_tokens=rng.choice([0, 0, 3]),
        stop_token_ids=list(range(0, VOCAB, 2)),
        allowed_token_ids=rng.choice([None, None, [2, 9, 31, 32, 69], list(range(0, VOCAB, 3))]),
        max_tokens=20,
    )
    params._bad_words_token_ids = rng.choice([None, None, [[9], [2], [69]], [[5, 7], [9, 9], [31, 2, 32], [4]]])
    return params


def any_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]


def change_requests(twins: Twins, rng: random.Random, params: list[SamplingParams]) -> list[str]:
    """Requests come and go; returns those that yield a token in the next step, in any order."""
    for name in [name for name in twins.names if rng.random() < 0.2]:
        twins.remove(name)
    while rng.random() < 0.7 and len(twins.names) < MAX_ROWS and params:
        twins.add(params.pop(), any_prompt(rng))
    wanted = [name for name in twins.names if rng.random() < 0.8]
    rng.shuffle(wanted)
    return wanted


@settings(max_examples=40)
@given(SEEDS, st.sampled_from(MODES))
def test_greedy_steps_equal_vllm(seed: int, mode: str) -> None:
    """Penalties, biases, masks, grammars, logprobs in each mode, any NaN pads, through every change of slots.

    covers: A9 A10 A18
    """
    rng = random.Random(seed)
    weights = torch.Generator().manual_seed(seed)
    twins = Twins(engine_config(mode))
    params = [device_params(rng, (0.0,)) for _ in range(20)]
    for _ in range(12):
        wanted = change_requests(twins, rng, params)
        twins.sync(wanted)
        logits = poisoned_logits(len(wanted), rng.randint(max(1, len(wanted)), MAX_ROWS), weights)
        grammar = random_grammar(twins.batch.req_ids, rng) if rng.random() < 0.5 else None
        if wanted:
            assert_same(*twins.sample(logits, grammar))
    assert not twins.bypasses


@settings(max_examples=40)
@given(SEEDS, st.sampled_from(MODES))
def test_random_steps_equal_vllm(seed: int, mode: str) -> None:
    """In any bucket both draw the same noise: tokens and logprobs are equal bit for bit, greedy rows among them."""
    rng = random.Random(seed)
    weights = torch.Generator().manual_seed(seed)
    twins = Twins(engine_config(mode))
    params = [device_params(rng, (0.0, 0.6, 1.0, 1.7)) for _ in range(20)]
    for _ in range(12):
        wanted = change_requests(twins, rng, params)
        twins.sync(wanted)
        logits = poisoned_logits(len(wanted), rng.randint(max(1, len(wanted)), MAX_ROWS), weights)
        grammar = random_grammar(twins.batch.req_ids, rng) if rng.random() < 0.3 else None
        if wanted:
            assert_same(*twins.sample(logits, grammar))
    assert not twins.bypasses


class OnlyTokenNine(LogitsProcessor):
    """A user's own processor."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert device.type == "cpu"

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        logits[:, 9] = 1000
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keeps nothing."""


WANTED: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [2, 9, 31, 32, 69]},
    "bad_words": {"bad_words_token_ids": [[token] for token in range(0, VOCAB, 3)]},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(0, VOCAB, 2))},
    "logit_bias": {"logit_bias": {4: 100.0, 5: -100.0}},
    "penalties": {"repetition_penalty": 2.0, "presence_penalty": 1.5, "frequency_penalty": 1.0},
    "random": {"temperature": 1.0, "seed": 5, "top_k": 3},
    "top_p": {"temperature": 1.0, "seed": 5, "top_p": 0.4, "min_p": 0.1},
}


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED.keys())
@pytest.mark.parametrize("warmed", [1, 2, MAX_ROWS])
@torch.inference_mode()
def test_a_warm_up_between_two_steps_changes_nothing(wanted: dict[str, Any], warmed: int) -> None:
    """Graphs are warmed in idle gaps; the next step of the same requests has what they ask for all the same."""
    twins = Twins(engine_config())
    params = dict(wanted)
    bad_words = params.pop("bad_words_token_ids", None)
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params})
    sampling._bad_words_token_ids = bad_words
    twins.sync([twins.add(sampling), twins.add(SamplingParams(temperature=0.0))])
    weights = torch.Generator().manual_seed(1)
    for _ in range(8):
        assert_same(*twins.sample(poisoned_logits(2, 4, weights)))
        twins.static.warm(warmed)


def test_custom_processors_are_applied_on_the_host() -> None:
    twins = Twins(engine_config(logits_processors=[OnlyTokenNine]))
    twins.sync([twins.add(SamplingParams(temperature=0.0))])
    found, _ = twins.sample(poisoned_logits(1, 4, torch.Generator().manual_seed(0)))
    assert found.tokens == [[9]]
    assert twins.bypasses == ["sampling on host: custom logits processors"]


def test_float64_noise_is_drawn_on_the_host() -> None:
    twins = Twins(engine_config(use_fp64_gumbel=True))
    twins.sync([twins.add(SamplingParams(temperature=0.0))])
    logits = poisoned_logits(2, 2, torch.Generator().manual_seed(0))
    assert_same(*twins.sample(logits[:1]))
    assert not twins.bypasses
    twins.sync([*twins.names, twins.add(SamplingParams(temperature=1.0))])
    assert_same(*twins.sample(logits))
    assert twins.bypasses == ["sampling on host: use_fp64_gumbel"]


def test_a_limit_of_logprobs_of_none_keeps_the_default_width() -> None:
    twins = Twins(engine_config(max_logprobs=-1))
    weights = torch.Generator().manual_seed(0)
    for wanted, reasons in ((20, []), (21, ["sampling on host: more than 20 logprobs"]), (-1, None)):
        twins.bypasses.clear()
        twins.sync([twins.add(SamplingParams(temperature=0.0, logprobs=wanted))])
        assert_same(*twins.sample(poisoned_logits(1, 3, weights)))
        assert reasons is None or twins.bypasses == reasons
        # a neighbour has its own, and stays on the device
        twins.sync([*twins.names[-1:], twins.add(SamplingParams(temperature=0.7, logprobs=2))])
        found, expected = twins.sample(poisoned_logits(2, 3, weights))
        assert found.tokens == expected.tokens
        assert found.logprobs is not None
        assert expected.logprobs is not None
        slot = twins.batch.req_ids.index(twins.names[-1])
        np.testing.assert_array_equal(found.logprobs.logprobs[slot, :3], expected.logprobs.logprobs[slot, :3])
        np.testing.assert_array_equal(found.logprobs.logprobs[1 - slot], expected.logprobs.logprobs[1 - slot])


# What torch makes of a tensor, of the host or copied to it, that is handed to numpy.
READS = ("aten.detach.", "aten.to.dtype_layout", "aten.resolve_conj.", "aten.resolve_neg.")


class Outside(TorchDispatchMode):
    """What reaches torch between the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.in_stage = False
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if not self.in_stage:
            self.seen.add(f"{func} {[tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args]}")
        return result


@settings(max_examples=25)
@given(SEEDS, st.sampled_from(MODES), st.sets(st.integers(1, MAX_ROWS), min_size=1, max_size=3))
@torch.inference_mode()
def test_nothing_is_new_after_warm_up(seed: int, mode: str, buckets: set[int]) -> None:
    """Any requests in a warmed number of rows: each stage is a recipe that warm-up made, and between the stages whole
    static tensors are copied, nothing else. covers: B5
    """
    rng = random.Random(seed)
    weights = torch.Generator().manual_seed(seed)
    recorder = RecipeRecorder("fail", device_type="cpu")
    outside = Outside()

    @contextmanager
    def stage(label: str) -> Iterator[None]:
        outside.in_stage = True
        with recorder.recording(label):
            yield
        outside.in_stage = False

    twins = Twins(engine_config(mode), stage)
    with outside:
        for rows in buckets:
            twins.static.warm(rows)
    recorder.seal()
    warmed = recorder.total
    warm_outside = set(outside.seen)
    params = [device_params(rng, (0.0, 0.0, 1.3)) for _ in range(20)]
    for _ in range(12):
        rows = rng.choice(sorted(buckets))
        wanted = change_requests(twins, rng, params)[:rows]
        twins.sync(wanted)
        logits = poisoned_logits(len(wanted), rows, weights)
        grammar = random_grammar(twins.batch.req_ids, rng) if rng.random() < 0.5 else None
        outside.seen.clear()
        with outside:
            tokens = twins.static.sample(logits, twins.batch, grammar).tokens
        assert not [seen for seen in outside.seen - warm_outside if not seen.startswith(READS)]
        assert len(tokens) == len(wanted)
        for request, (token,) in zip(twins.batch.slots, tokens, strict=True):
            request.output_token_ids.append(token)
    assert recorder.total == warmed
    assert not twins.bypasses


def test_warm_up_makes_ten_recipes_for_each_number_of_rows() -> None:
    """Masks, biases, a row to and from the host, penalties, greedy, random, random with top-k, top-p or min-p, and
    logprobs, and the lines of token counts, of which one alone is written too. covers: B5"""
    labels: list[str] = []
    recorder = RecipeRecorder("count", device_type="cpu")

    def stage(label: str) -> Any:
        labels.append(label)
        return recorder.recording(label)

    twins = Twins(engine_config(), stage)
    for rows in (1, 2, MAX_ROWS):
        twins.static.warm(rows)
    assert len(set(labels)) == 10
    assert recorder.total == 3 * 10 + 1


@pytest.mark.parametrize("top", [{"top_k": 9}, {"top_p": 0.9}, {"top_k": 60, "top_p": 0.99}])
def test_scores_of_tokens_too_unlikely_for_a_float(top: dict[str, Any]) -> None:
    """Top-p masks them and top-k does not, in the row that asks and in the one that does not."""
    twins = Twins(engine_config("processed_logits"))
    common = {"temperature": 1.0, "logprobs": WIDTH}
    twins.sync([twins.add(SamplingParams(**common, **top)), twins.add(SamplingParams(**common))])
    logits = torch.linspace(0, -2000, VOCAB).repeat(2, 1)
    torch.manual_seed(0)
    found, expected = twins.sample(logits)
    assert_same(found, expected)
    assert expected.logprobs is not None
    assert np.isinf(expected.logprobs.logprobs[1]).any() == ("top_p" in top)


@pytest.mark.parametrize("rows", [1, MAX_ROWS + 1])
def test_rows_that_do_not_fit_are_an_error(rows: int) -> None:
    twins = Twins(engine_config())
    twins.sync([twins.add(SamplingParams()), twins.add(SamplingParams())])
    with pytest.raises(ValueError, match=rf"{rows} logits rows for 2 requests.*at most {MAX_ROWS} \(--max-num-seqs\)"):
        twins.static.sample(torch.zeros(rows, VOCAB), twins.batch, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_pad_row_of_nan_has_a_token_on_cuda() -> None:
    """Which is why nothing bounds it there: each width takes another way through torch's reduction."""
    for width in (VOCAB, 5000, 128256):
        logits = torch.full((3, width), torch.nan, device="cuda")
        logits[1] = torch.arange(width)
        assert likeliest_tokens(logits).tolist() == [0, width - 1, 0]


def test_no_requests_no_tokens() -> None:
    twins = Twins(engine_config())
    assert twins.static.sample(torch.zeros(0, VOCAB), twins.batch, None) == ([], None)


def test_a_request_as_long_as_the_model_allows() -> None:
    """The widest history; the one that follows in its slot is short and must not inherit it. covers: A9"""
    twins = Twins(engine_config())
    penalised = {"temperature": 0.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    weights = torch.Generator().manual_seed(4)
    long = twins.add(SamplingParams(**penalised), list(range(MAX_MODEL_LEN - 4)))
    for _ in range(4):
        twins.sync([long])
        assert_same(*twins.sample(poisoned_logits(1, 2, weights)))
    twins.remove(long)
    short = twins.add(SamplingParams(**penalised), [60], name=long)
    for _ in range(3):
        twins.sync([short])
        assert_same(*twins.sample(poisoned_logits(1, 2, weights)))


def test_outputs_taken_back_are_forgotten() -> None:
    """A request whose outputs shrink, as one that is sent again does, is penalised for what it has."""
    twins = Twins(engine_config())
    name = twins.add(SamplingParams(temperature=0.0, presence_penalty=2.0))
    weights = torch.Generator().manual_seed(4)
    for _ in range(6):
        twins.sync([name])
        assert_same(*twins.sample(poisoned_logits(1, 2, weights)))
    for batch in (twins.batch, twins.own_batch):
        batch.slots[0].output_token_ids[:] = [69]
    twins.sync([name])
    found, expected = twins.sample(torch.arange(VOCAB).unsqueeze(0) * 1.5)
    assert found.tokens == expected.tokens == [[68]]


def test_nothing_keeps_a_request_that_has_ended() -> None:
    """Nor its prompt, once a step without it has sampled; its line of counts is free for another request."""
    twins = Twins(engine_config())
    plain, weights = SamplingParams(temperature=0.0), torch.Generator().manual_seed(4)
    for _ in range(2 * MAX_ROWS):
        name = twins.add(SamplingParams(temperature=0.0, presence_penalty=2.0))
        twins.sync([name])
        assert_same(*twins.sample(poisoned_logits(1, 2, weights)))
        request = weakref.ref(twins.batch.slots[0])
        twins.remove(name)
        twins.sync([twins.add(plain)])
        assert_same(*twins.sample(poisoned_logits(1, 2, weights)))
        gc.collect()
        assert request() is None


@settings(max_examples=20)
@given(st.integers(1, 200), st.integers(1, 5), SEEDS)
def test_bits_stand_for_tokens_at_any_width(vocab_size: int, words: int, seed: int) -> None:
    """Also where the logits have more or fewer tokens than the bitmask, where xgrammar's kernel is no oracle."""
    bits = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, (3, words), np.int64).astype(np.int32)
    logits = torch.zeros(3, vocab_size)
    found = mask_logits(logits, torch.from_numpy(bits), torch.arange(32, dtype=torch.int32))
    allowed = np.ones((3, max(vocab_size, words * 32)), bool)
    allowed[:, : words * 32] = np.unpackbits(bits.astype("<i4").view(np.uint8), axis=1, bitorder="little")
    assert torch.equal(found == 0, torch.from_numpy(allowed[:, :vocab_size]))
    assert torch.equal(logits, torch.zeros(3, vocab_size))


def test_no_operator_mixes_host_and_device() -> None:
    """The meta device refuses a CPU tensor wherever it is not copied."""
    recorder = RecipeRecorder("count", device_type="meta")
    sampler = StaticSampler(engine_config(), torch.device("meta"), MAX_ROWS, recorder.recording, print, HostWork())
    sampler.warm(4)
    assert recorder.total == 10 + 1
