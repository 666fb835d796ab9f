"""The limits of whole steps, which steps are measured, and the table. An engine stands for vLLM's, none is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import engine_steps
from benchmarks.engine_shapes import config_of, limit_ms
from benchmarks.engine_steps import FUSED, PRODUCTS, TORCH, StepTime, table
from benchmarks.engine_steps_side import SETTLED, Side, longest_request, new_tokens, start_facts, write_buckets
from benchmarks.tensor_parallel import BANDWIDTH
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, ModelSpec, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest
from vllm_gaudi_ucm.graphs.strategies.file import FromFile, read_bucket_file
from vllm_gaudi_ucm.observability import phase_log

ASKED: dict[str, Any] = {
    "config": config_of("8b"),
    "requests": [1, 16, 64],
    "context": 1024,
    "prompt": 2048,
    "repeats": 12,
    "kernels": True,
    "ahead": False,
    "adapters": 0,
    "rank": 16,
}


def test_a_decode_step_of_an_8b_model_is_bound_by_memory() -> None:
    """15.0 GB of weights, and 128 KiB of KV for each token of context."""
    for requests in (1, 16, 64):
        read = LLAMA_8B.weight_bytes + requests * 1024 * 131072
        found = limit_ms(LLAMA_8B, requests, 1024, BANDWIDTH, PRODUCTS)
        assert found == pytest.approx(1e3 * read / BANDWIDTH)
    assert limit_ms(LLAMA_8B, 1, 1024, BANDWIDTH, PRODUCTS) == pytest.approx(3.57, abs=0.01)


def test_a_prompt_step_is_bound_by_products() -> None:
    """7.0 billion weights of layers, half of 2048 x 2048 pairs of 32 heads of 128 twice, and one row of logits."""
    layers = 32 * (4096 * 128 * 80 + 3 * 4096 * 14336)
    attended = 2 * 32 * 32 * 128 * 2048 * 2049 / 2
    computed = 2 * (2048 * layers + 4096 * 128256 + attended)
    found = limit_ms(LLAMA_8B, 0, 2048, BANDWIDTH, PRODUCTS)
    assert found == pytest.approx(1e3 * computed / PRODUCTS)
    assert found == pytest.approx(37.6, abs=0.1)
    # one token is a decode step without a context
    assert limit_ms(LLAMA_8B, 0, 1, BANDWIDTH, PRODUCTS) == pytest.approx(1e3 * LLAMA_8B.weight_bytes / BANDWIDTH)


def test_a_mixture_reads_the_experts_that_rows_take() -> None:
    """Qwen3-30B-A3B: 8 experts of 3 x 2048 x 768 for one token, at most all 128; a prompt is bound by its products."""
    model, expert = ModelSpec.from_hf_config(config_of("30b-a3b")), 2 * 48 * 3 * 2048 * 768
    router, head, attention = 48 * 2048 * 128, 2048 * 151936, 48 * 2048 * 128 * (2 * 32 + 2 * 4)
    others, cached = 2 * (router + head + attention), 1024 * 2 * 48 * 2 * 4 * 128
    one, some, all_ = (
        limit_ms(model, n, 1024, BANDWIDTH, PRODUCTS, taken) for n, taken in ((1, 8), (16, 80), (64, 128))
    )
    for found, requests, experts in ((one, 1, 8), (some, 16, 80), (all_, 64, 128)):
        read = others + experts * expert + requests * cached
        assert found == pytest.approx(1e3 * read / BANDWIDTH)
    assert limit_ms(model, 1, 1024, BANDWIDTH, PRODUCTS) == pytest.approx(one)
    assert some < limit_ms(model, 16, 1024, BANDWIDTH, PRODUCTS) < all_
    pairs = 48 * 32 * 2 * 128 * 2048 * 2049 / 2
    computed = 2 * (2048 * (attention + router + 48 * 8 * 3 * 2048 * 768) + head + pairs)
    assert limit_ms(model, 0, 2048, BANDWIDTH, PRODUCTS) == pytest.approx(1e3 * computed / PRODUCTS)


def test_a_decode_reads_and_writes_its_states() -> None:
    """A layer with a state in place of a context has weights of its own in place of attention's."""
    model = ModelSpec.from_hf_config(config_of("qwen3-next"))
    assert model.states is not None
    # a convolution's last 3 rows of q, k and v, and 32 heads of 128 x 128, in bfloat16
    assert model.states.bytes_each == 2 * (3 * 8192 + 32 * 128 * 128)
    assert model.states.weights == 2048 * (8192 + 4096 + 64) + 4096 * 2048
    one, more = (limit_ms(model, 64, tokens, BANDWIDTH, PRODUCTS, 100) for tokens in (0, 1000))
    assert more - one == pytest.approx(1e3 * 64 * 1000 * 6 * 2 * 2 * 256 * 2 / BANDWIDTH)
    two = limit_ms(model, 128, 0, BANDWIDTH, PRODUCTS, 100)
    assert two - one == pytest.approx(1e3 * 64 * 2 * 18 * model.states.bytes_each / BANDWIDTH)
    granite = ModelSpec.from_hf_config(config_of("granite-4-h"))
    assert granite.experts is not None
    assert granite.experts.shared == 1536


def test_a_decode_over_latents_reads_them_once() -> None:
    """DeepSeek-V2-Lite: 576 elements a token and layer for 16 heads, and shared experts always."""
    model = ModelSpec.from_hf_config(config_of("v2-lite"))
    few, many = (limit_ms(model, 1, tokens, BANDWIDTH, PRODUCTS, 6) for tokens in (1000, 3000))
    assert many - few == pytest.approx(1e3 * 2000 * 27 * 576 * 2 / BANDWIDTH)


def test_the_table_has_ratios_where_there_are_limits() -> None:
    steps = [
        StepTime(FUSED, 16, 1024, 9.0, 8.5, 8.0, "[]", 1040.0, 4.0, 300, True),
        StepTime(TORCH, 0, 2048, 50.0, 49.0, None, "[]"),
    ]
    console = Console(width=140)
    with console.capture() as capture:
        console.print(table(steps))
    lines = [line for line in capture.get().splitlines() if FUSED in line or TORCH in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells[0] == ["decode of 16 at 1024", "fused, ahead", "9.00", "8.50", "8.00", "1.00", "4.00", "2.25", "300"]
    assert cells[1] == ["prompt of 2048", "torch", "50.00", "49.00", "-", "-", "-", "-", "-"]


class Engine:
    """Schedules as vLLM does: a token for each decode first, then prompts in their order, up to a step's budget.

    ahead: what a step gives comes with the next one.
    """

    def __init__(self, budget: int, ahead: bool = False) -> None:
        self._queued: list[list[Any]] = [[]] if ahead else []
        self.phase_log = SimpleNamespace(summary=SimpleNamespace(steps=0))
        self.budget = budget
        self.records: list[SimpleNamespace] = []
        self.replays = 0
        self._live: list[SimpleNamespace] = []
        static = SimpleNamespace(execution=SimpleNamespace(forward=self._replay, logits=lambda rows: self._replay()))
        parts = SimpleNamespace(records=SimpleNamespace(phase_log=self.phase_log))
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace(static=static, parts=parts)))
        self.engine_core = SimpleNamespace(
            engine_core=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        )

    def _replay(self) -> None:
        self.replays += 1

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any, lora_request: None = None) -> None:
        tokens = len(prompt["prompt_token_ids"])
        self._live.append(SimpleNamespace(name=name, left=tokens, prompt=tokens, new=params.max_tokens, said=0))

    def has_unfinished_requests(self) -> bool:
        return bool(self._live or any(self._queued))

    def step(self) -> list[Any]:
        torch.zeros(8).add_(1)  # which the profiler sees
        if not self._live:
            self._queued.insert(0, [])
            return self._queued.pop()
        room, seen, outputs = self.budget, 0, []
        for request in sorted(self._live, key=lambda one: one.left > 0):
            taken = min(room, request.left or 1)
            room -= taken
            if not request.left:
                seen += request.prompt + request.said - 1
            request.left -= taken if request.left else 0
            if taken and not request.left:
                request.said += 1
                outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * request.said)]))
        self._live = [request for request in self._live if request.said < request.new]
        tokens = self.budget - room
        self.phase_log.summary.steps += 1
        times = {"plan_ms": 1.0, "forward_ms": 2.0, "sample_ms": 3.0}
        padded = Bucket("--u", tokens, 0, 9, 1)
        self.records.append(SimpleNamespace(tokens=tokens, unique_pairs=seen, shared_pairs=0, padded=padded, **times))
        if not self._queued:
            return outputs
        self._queued.insert(0, outputs)
        return self._queued.pop()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_steps_that_are_measured(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Every request decodes in all of them, though those that came first have many more tokens; nothing is left."""
    engine = Engine(ASKED["prompt"], ahead)
    side = Side({**ASKED, "ahead": ahead}, engine, Path("unused"))
    found = []
    for requests in ASKED["requests"]:
        before = engine.replays
        found.append(side.decode(requests))
        assert engine.replays > before
        assert not engine.has_unfinished_requests()
    found.append(side.prompt())
    monkeypatch.setattr(phase_log, "read_phase_log", lambda path: (None, engine.records))
    steps = side.worker_times(found)
    for step, requests in zip(steps, (1, 16, 64), strict=False):
        assert step["requests"] == requests
        assert step["worker_ms"] == 6.0
        assert 1024 + SETTLED < step["context"] < 1024 + new_tokens(ASKED, requests)
        assert step["padded"] == f"['--u', {requests}, 0, 9, 1]"
    assert (steps[3]["requests"], steps[3]["tokens"], steps[3]["padded"]) == (0, 2048, "['--u', 2048, 0, 9, 1]")
    assert all(step["wall_ms"] > 0 and step["device_ms"] > 0 and step["launches"] > 0 for step in steps)
    assert set(side.kernels) == {"decode of 1", "decode of 16", "decode of 64", "prompt of 2048"}
    json.dumps([steps, side.kernels])


def test_where_the_time_of_a_start_went() -> None:
    """vLLM keeps the seconds that its worker says the warm-up took; without static shapes there are no graphs."""
    engine: Any = Engine(ASKED["prompt"])
    engine.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(compilation_time=20.0))
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    runner.static.execution.ready = SimpleNamespace(buckets=SimpleNamespace(num_graphs=48))
    runner.start_stages = SimpleNamespace(seconds={"model": 3.0})
    found = start_facts(engine, 9.5, 61.0)
    assert found.pop("stages") == {"model": 3.0}
    assert found == {"start_seconds": 61.0, "import_seconds": 9.5, "warm_up_seconds": 20.0, "graphs": 48}
    runner.static = None
    assert start_facts(engine, 9.5, 61.0)["graphs"] == 0


def test_too_few_decode_steps_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"needs a prompt step .* of more than 64 tokens, found 64"):
        longest_request({**ASKED, "prompt": 64})
    monkeypatch.setattr("benchmarks.engine_steps_side.new_tokens", lambda asked, requests: 10)
    with pytest.raises(RuntimeError, match=r"found \d+ decode steps of 64 requests after the first 6, expected 12"):
        Side(ASKED, Engine(ASKED["prompt"]), Path("unused")).decode(64)


def test_every_kind_of_step_has_a_bucket_of_its_own_size(tmp_path: Path) -> None:
    """The server takes the file, whatever blocks it has, and finds a decode of N requests a bucket of N rows."""
    write_buckets(tmp_path / "buckets.yaml", ASKED)
    limits, _, logits = read_bucket_file(tmp_path / "buckets.yaml")
    assert sorted(logits) == [1, 16, 64]
    cost = CostModel(device_spec("h200"), LLAMA_8B, 128)
    served = replace(limits, num_blocks=6000, max_shared_blocks=40)
    buckets = FromFile().choose(BucketRequest(served, cost, path=tmp_path / "buckets.yaml"))
    for requests in (1, 16, 64):
        # blocks of each, and the dummy block's
        step = Bucket("--u", requests, 0, requests * 9 + 1, requests)
        assert buckets.lookup(step) == step
    assert buckets.lookup(Bucket("c--", 2048, 0, 0, 1)) == Bucket("c--", 2048, 0, 0, 1)
    assert buckets.num_graphs == 8


@pytest.mark.parametrize("both", [False, True])
def test_what_is_measured_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, both: bool
) -> None:
    """From the command line to the table and the file; the limit is that of the context that requests really had."""

    stages = {"model": 3.04, "kernels": 12.5}
    started = {"start_seconds": 61.26, "import_seconds": 9.75, "warm_up_seconds": 20.0, "graphs": 48, "stages": stages}

    def serve(options: Any, layers: str, ahead: bool, adapters: int) -> dict[str, Any]:
        step = {"requests": 64, "tokens": 1024, "wall_ms": 9.0, "worker_ms": 8.0, "device_ms": 7.0, "padded": "[]"}
        kernels = {"decode of 64": [["norm_rows", 65, 0.3]]} if layers == FUSED else {}
        return {
            "steps": [{**step, "launches": 300, "context": 1060.0}],
            "facts": {"device": "a GPU", **started, "kernels": kernels},
        }

    monkeypatch.setattr(engine_steps, "serve", serve)
    written = tmp_path / "steps.json"
    more = ["--without-fused-layers"] if both else ["--no-asynchronous"]
    options = ["--device", "cuda", "--json", str(written), *more]
    engine_steps.main(options)
    shown = capsys.readouterr().out
    assert "norm_rows" in shown
    engines = ["fused", "fused, ahead", "torch"] if both else ["fused"]
    taken = "61.3 s, of them 9.8 s imports and 20.0 s warm-up of 48 graphs; by stage: model 3.0, kernels 12.5"
    assert [line for line in shown.splitlines() if line.startswith("start-up")] == [
        f"start-up, {engine}: {taken}" for engine in engines
    ]
    steps = json.loads(written.read_text())["steps"]
    assert [step["layers"] for step in steps] == ([FUSED, FUSED, TORCH] if both else [FUSED])
    assert [step["ahead"] for step in steps] == ([False, True, False] if both else [False])
    assert steps[0]["limit_ms"] == pytest.approx(limit_ms(LLAMA_8B, 64, 1060.0, BANDWIDTH, PRODUCTS))
    assert steps[0]["ratio"] == pytest.approx(9.0 / steps[0]["limit_ms"])
