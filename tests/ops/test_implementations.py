"""The registry of implementations: one from outside is chosen, named, and refused with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.ops.batch import Batch, Request, Shape, build
from tests.ops.local import Features, with_features
from tests.ops.oracle import assert_matches
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.decisions.graph_kind import graph_kind
from vllm_gaudi_ucm.ops.cpu.native.library import why_not_native
from vllm_gaudi_ucm.ops.registry import Implementation, Implementations
from vllm_gaudi_ucm.ops.unified_attention.api import (
    choose_implementation,
    choose_static_implementation,
    prepare,
    unified_attention,
)
from vllm_gaudi_ucm.ops.unified_attention.implementation import ATTENTION
from vllm_gaudi_ucm.ops.unified_attention.spec import AttentionSpec
from vllm_gaudi_ucm.options.errors import UcmConfigError

REQUESTS = [Request(5, 1), Request(4, 3, prefix=1), Request(0, 4)]
SLOPED = AttentionSpec(0.25, has_slopes=True)
FILE = '''
from vllm_gaudi_ucm.ops.unified_attention.impl.reference import ReferenceAttention

calls = []


class OutsideAttention(ReferenceAttention):
    """The fastest on a CPU, for plain attention at true shapes."""

    devices = frozenset({"cpu"})
    priority = 1000
    capturable = False

    def supports(self, spec):
        return spec.is_plain

    def attend(self, *arguments):
        calls.append(1)
        return super().attend(*arguments)
'''


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An installed package with one file and an entry point; what it was called for."""
    (tmp_path / "outside_attention.py").write_text(FILE)
    info = tmp_path / "outside_attention-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: outside-attention\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm_gaudi_ucm.attention_implementations]\noutside = outside_attention:OutsideAttention\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with ATTENTION.scope():
        found: list[int] = import_module("outside_attention").calls
        found.clear()
        yield found


def _tensors(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.query, batch.key, batch.value, batch.key_cache, batch.value_cache


def test_one_from_outside_is_chosen_and_computes(calls: list[int]) -> None:
    assert choose_implementation("auto", "cpu") == "outside"
    assert choose_static_implementation("auto", "cpu") == "reference"
    assert choose_implementation("auto", "hpu") == "hpu"
    assert_matches(build(REQUESTS, Shape(poison=0.0)), "auto")
    assert_matches(build(REQUESTS, Shape(poison=0.0)), "outside", prepared=True)
    assert len(calls) == 2


def test_one_from_outside_by_name(calls: list[int]) -> None:
    config = resolve_config({"ucm": {"attention": {"implementation": "outside"}}})
    assert choose_implementation(config.attention.implementation, "cpu") == "outside"
    with pytest.raises(ValueError, match=r"'outside' cannot be used here \(it is for cpu, got tensors on hpu\)"):
        choose_implementation("outside", "hpu")
    with pytest.raises(ValueError, match=r"'outside' reads tensors on the host.* choose one of auto, reference, hpu, "):
        choose_static_implementation("outside", "cpu")
    static = resolve_config({"ucm": {"attention": {"implementation": "outside"}, "graphs": {"mode": "eager"}}})
    with pytest.raises(ValueError, match=r"ucm\.attention\.implementation: 'outside' reads"):
        graph_kind(static, "cpu", True, False)
    with pytest.raises(UcmConfigError, match=r'expected one of "auto", "reference", .*, "outside"'):
        resolve_config({"ucm": {"attention": {"implementation": "inside"}}})


def test_what_it_does_not_support_is_refused_by_name_and_left_to_others(calls: list[int]) -> None:
    batch = with_features(build(REQUESTS, Shape(poison=0.0)), Features(slopes=True), 4)
    heads = batch.per_head
    # the next one that computes slopes, where the machine has a compiler or not
    other = "reference" if why_not_native() else "native"
    with pytest.raises(ValueError, match=rf"'outside' .* \(it does not compute has_slopes=True\), .* or '{other}'"):
        unified_attention(*_tensors(batch), batch.parts, SLOPED, implementation="outside", per_head=heads)
    ready = prepare(batch.parts, 4, implementation="outside")
    with pytest.raises(ValueError, match=r"'outside' does not compute has_slopes=True, prepare .* for 'reference'"):
        unified_attention(*_tensors(batch), ready, SLOPED, per_head=heads)
    arguments = (*_tensors(batch), batch.parts, SLOPED)
    found = unified_attention(*arguments, per_head=heads)
    assert torch.equal(found, unified_attention(*arguments, implementation=other, per_head=heads))
    assert not calls


def test_it_is_forgotten_at_the_end_of_a_scope() -> None:
    assert "outside" not in ATTENTION
    with pytest.raises(ValueError, match="'outside' is unknown, choose one of auto, reference"):
        ATTENTION.make("outside")


class OnlyGaudi(Implementation[AttentionSpec]):
    devices = frozenset({"hpu"})

    def supports(self, spec: AttentionSpec) -> bool:
        return spec.is_plain


class HostOnly(Implementation[AttentionSpec]):
    capturable = False


def test_where_nothing_fits_every_reason_is_named() -> None:
    some: Implementations[Implementation[AttentionSpec]] = Implementations("some_operation", "tests.no_packages")
    some.register("gaudi", OnlyGaudi)
    some.register("host", HostOnly)
    assert some.choose("auto", "cpu", SLOPED).name == "host"
    with pytest.raises(
        ValueError,
        match=r"some_operation: no implementation of has_slopes=True on hpu: gaudi \(it "
        r"does not compute has_slopes=True\), host \(it reads tensors on the host.*\)",
    ):
        some.choose("auto", "hpu", SLOPED, captured=True)
    assert some.explain("cpu") == {"gaudi": "it is for hpu", "host": ""}
