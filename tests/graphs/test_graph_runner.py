"""Graph runners: one function, captured per key, replayed over inputs whose contents change."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from vllm_gaudi_ucm.graphs.runners.base import EagerRunner, GraphRunner, runner_maker
from vllm_gaudi_ucm.graphs.runners.compiled import compile_static

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
    """A runner of `Doubled`, and static inputs of two keys."""

    def __init__(self, kind: str, device: str) -> None:
        self.function = Doubled(device)
        self.runner: GraphRunner = runner_maker(kind)(self.function)
        self.values = {key: torch.zeros(key, device=device) for key in (3, 8)}
        self.offsets = {key: torch.zeros(key, device=device) for key in (3, 8)}

    def capture(self, key: int) -> None:
        self.runner.capture(key, (self.values[key], (key, (self.offsets[key],))))

    def replay(self, key: int, value: float, offset: float) -> list[float]:
        self.values[key].fill_(value)
        self.offsets[key].fill_(offset)
        self.runner.replay(key, (self.values[key], (key, (self.offsets[key],))))
        return self.function.result[:key].tolist()


@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_a_replay_computes_with_what_is_in_the_inputs_now(kind: str, device: str) -> None:
    """covers: B6"""
    runner = Runner(kind, device)
    for key in (3, 8):
        runner.capture(key)
    assert runner.runner.captured() == 2
    for key, value, offset in [(3, 1.0, 0.0), (8, 5.0, 1.0), (3, 2.0, 4.0), (3, -1.0, 0.0)]:
        assert runner.replay(key, value, offset) == [2 * value + key + offset] * key


@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_a_capture_really_executes(kind: str, device: str) -> None:
    """covers: B6"""
    runner = Runner(kind, device)
    runner.values[3].fill_(4.0)
    runner.capture(3)
    assert runner.function.result.tolist() == [11.0] * 3 + [0.0] * 5


@pytest.mark.parametrize(("kind", "device"), KINDS)
def test_a_key_that_was_never_captured_is_an_error_and_runs_nothing(kind: str, device: str) -> None:
    """covers: B1. Nothing is compiled on a request's path, not even by mistake."""
    runner = Runner(kind, device)
    runner.capture(3)
    runs = runner.function.runs
    with pytest.raises(KeyError, match="8"):
        runner.replay(8, 1.0, 0.0)
    assert runner.function.runs == runs
    assert runner.runner.captured() == 1


@pytest.mark.parametrize("kind", ["eager", "compile"])
def test_kinds_without_graphs_of_their_own_call_the_function(kind: str) -> None:
    assert runner_maker(kind) is EagerRunner


def test_every_shape_is_compiled_once_and_none_becomes_dynamic() -> None:
    """More shapes than dynamo compiles of itself before it gives up. covers: B1 B10"""
    shapes: list[list[torch.Size]] = []

    @torch._dynamo.register_backend(name="ucm_counted")
    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        shapes.append([value.shape for value in inputs])
        return module.forward

    def function(value: torch.Tensor) -> torch.Tensor:
        return value * 2 + 1

    compiled = compile_static(function, "ucm_counted")
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

    compiled = compile_static(lambda value: value * 3, "ucm_counted_in_thread")

    def warm() -> None:
        for size in range(2, 22):
            compiled(torch.ones(size))

    thread = threading.Thread(target=warm)
    thread.start()
    thread.join()
    assert shapes == [torch.Size([size]) for size in range(2, 22)]
    warm()
    assert len(shapes) == 20
