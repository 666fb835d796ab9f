"""Arguments of unified_attention: clear errors, choice of the implementation, compilation."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batch import Request, Shape, build
from tests.ops.oracle import CUDA_RUNS, attend
from vllm_gaudi_ucm.ops.cpu.native.library import native
from vllm_gaudi_ucm.ops.unified_attention.api import (
    PreparedParts,
    choose_implementation,
    choose_static_implementation,
    prepare,
    unified_attention,
)
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import attention as cuda
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION

REQUESTS = [Request(5, 1), Request(4, 3, prefix=1), Request(0, 4)]


def _arguments() -> dict[str, object]:
    batch = build(REQUESTS, Shape(poison=0.0))
    return {
        name: getattr(batch, name) for name in ("query", "key", "value", "key_cache", "value_cache", "parts", "spec")
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(10, 64)}, "query has dimensions 2, expected 3"),
        ({"query": torch.zeros(10, 3, 16)}, "3 heads, expected a multiple of the 2 kv heads"),
        ({"key": torch.zeros(9, 2, 16)}, r"key has shape \(9, 2, 16\), expected \(10, 2, 16\)"),
        ({"key": torch.zeros(10, 2, 16, dtype=torch.float16)}, "key has dtype torch.float16, expected torch.float32"),
        ({"value": torch.zeros(10, 1, 16)}, "value has shape"),
        ({"key_cache": torch.zeros(9, 4, 2, 8)}, "key_cache has shape"),
        ({"value_cache": torch.zeros(9, 3, 2, 16)}, "key_cache has shape"),
        ({"out": torch.zeros(10, 4, 8)}, r"out has shape \(10, 4, 8\), expected \(10, 4, 16\)"),
        ({"out": torch.zeros(10, 4, 16, dtype=torch.float16)}, "out has dtype"),
        ({"key": torch.zeros(10, 2, 16, device="meta")}, "key has device meta, expected cpu"),
        ({"implementation": "fast"}, "implementation 'fast' is unknown, choose one of auto, reference, cpu"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unified_attention(**{**_arguments(), **change})  # type: ignore[arg-type]


def test_float64_is_refused() -> None:
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in _arguments().items()}
    with pytest.raises(ValueError, match="query has dtype"):
        unified_attention(**wide)  # type: ignore[arg-type]


def test_parts_prepared_for_another_block_size() -> None:
    arguments = _arguments()
    arguments["parts"] = prepare(arguments["parts"], 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key_cache has block size 4, expected 8"):
        unified_attention(**arguments)  # type: ignore[arg-type]


def test_auto_is_native_on_cpu_and_prepared_parts_keep_their_implementation() -> None:
    batch = build(REQUESTS, Shape(poison=0.0))
    assert prepare(batch.parts, 4).implementation.name == ("cpu" if native() is None else "native")
    slow = prepare(batch.parts, 4, implementation="reference")
    assert slow.plan is batch.parts
    tensors = (batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache)
    assert torch.equal(unified_attention(*tensors, slow, batch.spec), attend(batch, "reference"))


def test_prepared_parts_serve_many_layers() -> None:
    batch = build(REQUESTS, Shape(poison=0.0))
    ready = prepare(batch.parts, 4)
    for layer in range(3):
        other = build(REQUESTS, Shape(poison=0.0, seed=0))
        for tensor in (other.key_cache, other.value_cache, other.key, other.value):
            tensor *= layer + 1
        tensors = (other.query, other.key, other.value, other.key_cache, other.value_cache)
        torch.testing.assert_close(unified_attention(*tensors, ready, other.spec), attend(other, "reference"))


def test_operands_may_be_views() -> None:
    """Rows of a fused qkv tensor, as models make them."""
    batch = build(REQUESTS, Shape(poison=0.0))
    expected = attend(batch, "reference")
    fused = torch.cat([tensor.flatten(1) for tensor in (batch.query, batch.key, batch.value)], dim=1)
    query, key, value = fused.split([64, 32, 32], dim=1)
    batch.query, batch.key, batch.value = query.view(-1, 4, 16), key.view(-1, 2, 16), value.view(-1, 2, 16)
    for implementation in ("reference", "cpu"):
        torch.testing.assert_close(attend(batch, implementation), expected)


def test_heads_with_an_inner_stride() -> None:
    batch = build(REQUESTS, Shape(poison=0.0))
    expected = attend(batch, "reference")
    for name in ("query", "key", "value", "key_cache", "value_cache"):
        tensor = getattr(batch, name)
        setattr(batch, name, torch.stack([tensor, tensor], dim=-1)[..., 0])
    torch.testing.assert_close(attend(batch, "cpu"), expected)


def test_traces_as_one_graph_with_the_reference() -> None:
    """No host read is left in the traced operation: it must be capturable."""
    arguments = _arguments()
    compiled = torch.compile(unified_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**arguments), unified_attention(**arguments))  # type: ignore[arg-type]


def test_auto_is_cuda_on_a_gpu_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs too; without triton it is the reference."""
    for choose in (choose_implementation, choose_static_implementation):
        for reason, expected in ((None, "cuda"), ("triton cannot be imported", "reference")):
            monkeypatch.setattr(cuda, "why_not_triton", lambda device, reason=reason: reason)
            with ATTENTION.scope():
                assert choose("auto", "cuda") == expected
        assert choose("reference", "cuda") == "reference"


@pytest.mark.skipif(CUDA_RUNS, reason="CUDA kernels run here")
@pytest.mark.parametrize(
    ("device", "reason"), [("cpu", "TRITON_INTERPRET=1 is not set"), ("hpu", "the kernels are for cuda")]
)
def test_cuda_is_refused_elsewhere(device: str, reason: str) -> None:
    """covers: A18"""
    for choose in (choose_implementation, choose_static_implementation):
        with pytest.raises(ValueError, match=f"'cuda' cannot be used here .*({reason}|cannot be imported)"):
            choose("cuda", device)


def test_what_is_compiled_is_the_reference_where_kernels_cannot_be_traced() -> None:
    arguments = _arguments()
    prepared = PreparedParts(arguments["parts"], 4, ATTENTION.make("cuda"), None)  # type: ignore[arg-type]
    compiled = torch.compile(unified_attention, backend="eager", fullgraph=True)
    found = compiled(**{**arguments, "parts": prepared})
    torch.testing.assert_close(found, unified_attention(**arguments, implementation="reference"))  # type: ignore[arg-type]
