"""Graph runners: one function, captured per key, replayed over inputs whose contents change."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from vllm_gaudi_ucm.graphs.runners.base import EagerRunner, GraphRunner, Replay
from vllm_gaudi_ucm.graphs.runners.compiled import BEFORE_BUCKETS, StaticCompiler
from vllm_gaudi_ucm.graphs.runners.maker import runner_maker

KINDS = [
    ("eager", "cpu"),
    ("compile", "cpu"),
    pytest.param(
        "cuda_graph", "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ),
]


class Doubled:
    """`result = 2 * input + add`, and how often the host ran it."""

    def __init__(self, device: str) -> None:
        self.result = torch.zeros(8, device=device)
        self.runs = 0

    def __call__(self, value: torch.Tensor, form: tuple[int, tuple[torch.Tensor, ...]]) -> None:
        self.runs += 1
        add, (offsets,) = form
        self.result[: len(value)].copy_(value * 2 + add + offsets)


class Runner:
    """Graphs of `Doubled`, and static inputs of two keys."""

    def __init__(self, kind: str, device: str) -> None:
        self.function = Doubled(device)
        self.runner: GraphRunner = runner_maker(kind, StaticCompiler("eager"))(self.function)
        self.values = {key: torch.zeros(key, device=device) for key in (3, 8)}
        self.offsets = {key: torch.zeros(key, device=device) for key in (3, 8)}
        self.graphs: dict[int, Replay] = {}

    def capture(self, key: int) -> None:
        self.graphs[key] = self.runner.capture((self.values[key], (key, (self.offsets[key],))))

    def replay(self, key: int, value: float, offset: float) -> list[float]:
        self.values[key].fill_(value)
        self.offsets[key].fill_(offset)
        self.graphs[key]()
        return self.function.result[:key].tolist()


@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_a_replay_computes_with_what_is_in_the_inputs_now(kind: str, device: str) -> None:
    """covers: B6"""
    runner = Runner(kind, device)
    for key in (3, 8):
        runner.capture(key)
    for key, value, offset in [(3, 1.0, 0.0), (8, 5.0, 1.0), (3, 2.0, 4.0), (3, -1.0, 0.0)]:
        assert runner.replay(key, value, offset) == [2 * value + key + offset] * key


@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_a_capture_really_executes(kind: str, device: str) -> None:
    """covers: B6"""
    runner = Runner(kind, device)
    runner.values[3].fill_(4.0)
    runner.capture(3)
    assert runner.function.result.tolist() == [11.0] * 3 + [0.0] * 5


def test_a_kind_without_graphs_of_its_own_calls_the_function() -> None:
    assert runner_maker("eager") is EagerRunner


def test_every_shape_is_compiled_once_and_none_becomes_dynamic() -> None:
    """More shapes than dynamo compiles of itself before it gives up. covers: B1 B10"""
    shapes: list[list[torch.Size]] = []

    @torch._dynamo.register_backend(name="ucm_counted")
    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        shapes.append([value.shape for value in inputs])
        return module.forward

    def function(value: torch.Tensor) -> torch.Tensor:
        return value * 2 + 1

    compiler = StaticCompiler("ucm_counted")
    compiler.expect(20)
    compiled = compiler.region(function)
    for size in [*range(2, 22), *range(2, 22)]:
        assert compiled(torch.ones(size)).tolist() == [3.0] * size
    assert shapes == [[torch.Size([size])] for size in range(2, 22)]


def test_shapes_that_a_thread_has_compiled_are_compiled_for_all() -> None:
    """Buckets are warmed in a thread, where dynamo's limits are those of that thread. covers: B1 B10"""
    shapes: list[torch.Size] = []

    @torch._dynamo.register_backend(name="ucm_counted_in_thread")
    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        shapes.append(inputs[0].shape)
        return module.forward

    compiler = StaticCompiler("ucm_counted_in_thread")
    compiler.expect(20)
    compiled = compiler.region(lambda value: value * 3)

    def warm() -> None:
        for size in range(2, 22):
            compiled(torch.ones(size))

    thread = threading.Thread(target=warm)
    thread.start()
    thread.join()
    assert shapes == [torch.Size([size]) for size in range(2, 22)]
    warm()
    assert len(shapes) == 20


def test_more_kinds_of_calls_than_buckets_are_an_error() -> None:
    """Dynamo would go on eagerly and say nothing."""

    def scale(value: torch.Tensor, factor: int) -> torch.Tensor:
        return value * factor

    compiler = StaticCompiler("eager")
    compiler.expect(1)
    compiled = compiler.region(scale)
    value = torch.ones(3)
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        for factor in range(BEFORE_BUCKETS + 1):
            assert compiled(value, factor).tolist() == [factor] * 3
        with pytest.raises(RuntimeError, match=r"compiled region .*scale: found more than 65 .* 'eager' serves"):
            compiled(value, BEFORE_BUCKETS + 1)


def test_a_torch_that_compiles_nothing_is_refused() -> None:
    """TORCH_COMPILE_DISABLE, which torch reads when it is imported: regions would run eagerly without a word."""
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(RuntimeError, match=r"found TORCH_COMPILE_DISABLE=1.*expected it unset"),
    ):
        StaticCompiler("eager")


def test_guards_are_skipped_in_replays_alone() -> None:
    """A replay of another bucket finds its graph; one that was never compiled is an error, not a wrong graph."""
    compiler = StaticCompiler("eager")
    result = torch.zeros(8)
    region = compiler.region(lambda value: value * 2 + 1)

    def function(value: torch.Tensor) -> None:
        result[: len(value)].copy_(region(value))

    runner = runner_maker("compile", compiler)(function)
    inputs = {size: torch.full((size,), float(size)) for size in (3, 5, 8)}
    replays = {size: runner.capture((inputs[size],)) for size in (3, 5)}
    compiler.skip_guards()
    for size in (3, 5, 5, 3):
        replays[size]()
        assert result[:size].tolist() == [2.0 * size + 1] * size
    assert region(inputs[8]).tolist() == [17.0] * 8  # outside of replays others compile
    cold = replays[3].__class__(replays[3].func, (torch.ones(4),))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"ucm\.graphs\.skip_guards excludes"):
        cold()
