"""Duties 7 to 13: what a region compiles, what leaves it, and what its writes cost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sim.regions import compiled


def ones(*size: int, **options: Any) -> Tensor:
    return torch.ones(size, device="hpu", **options)


KEYS: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "sizes": (lambda: ones(2, 4), lambda: ones(3, 4)),
    "strides": (lambda: ones(4, 4), lambda: ones(4, 4).t()),
    "storage offsets": (lambda: ones(8, 4)[:2], lambda: ones(8, 4)[2:4]),
    "dtypes": (lambda: ones(2, 4), lambda: ones(2, 4, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_recipes(name: str, compilations: Any) -> None:
    """Duty 7."""
    one, other = (make() for make in KEYS[name])
    again = KEYS[name][0]().mul_(3)
    run = compiled(lambda x: x * 2 + 1)
    assert compilations(lambda: run(one)) == 1
    assert compilations(lambda: run(one)) == 0
    assert compilations(lambda: run(again)) == 0, "contents and addresses are no part of it"
    assert compilations(lambda: run(other)) == 1


def test_layers_share_recipes(compilations: Any) -> None:
    """Duty 7: weights of each layer are tensors of their own; slices of one tensor would be a recipe each."""
    run = compiled(lambda x, weight: x @ weight)
    x, apart, stacked = ones(2, 4), [ones(4, 4) for _ in range(3)], ones(3, 4, 4)
    assert compilations(lambda: [run(x, weight) for weight in apart]) == 1
    assert compilations(lambda: [run(x, weight) for weight in stacked]) == 2, "the first one is at offset 0"


def test_alternating_shapes(card: Any, compilations: Any) -> None:
    """Duty 8: one symbolic entry, two shapes: recipes exist, but the slot holds one."""
    run = compiled(lambda x: x * 2, dynamic=True)
    inputs = [ones(size, 4) for size in (5, 6, 5, 6, 6)]
    assert [compilations(lambda x=x: run(x)) for x in inputs] == [1, 1, 0, 0, 0]
    assert card.compiled_graphs == 1
    assert (card.graph_compiles, card.pipeline_drains) == (4, 4)


def test_static_shapes_have_a_slot_each(card: Any) -> None:
    """Duty 8."""
    run = compiled(lambda x: x * 2)
    for size in (5, 6, 5, 6, 6):
        run(ones(size, 4))
    assert (card.compiled_graphs, card.graph_compiles) == (2, 2)
    run = compiled(lambda x: x * 2, dynamic=True, force_static_compile=False)
    card.reset()
    for size in (5, 6, 5):
        run(ones(size, 4))
    assert card.graph_compiles == 1


def test_symbolic_sdpa(card: Any, duties: Any, forbidden: Any) -> None:
    """Duty 9."""
    x, y = torch.rand(1, 2, 5, 4).to("hpu"), torch.rand(1, 2, 6, 4).to("hpu")
    sdpa = torch.library.Library("hpu", "FRAGMENT")
    sdpa.define("sdpa_of_test(Tensor q) -> Tensor")
    sdpa.impl("sdpa_of_test", lambda q: q * 2, "CompositeExplicitAutograd")
    sdpa._register_fake("sdpa_of_test", torch.empty_like)
    call = lambda q: torch.ops.hpu.sdpa_of_test(q) + 1  # noqa: E731
    with duties.without(40):
        for dynamic, options in ((True, {}), (False, {"force_static_compile": False})):
            assert torch.equal(compiled(call, dynamic=dynamic, **options)(x), x * 2 + 1)
        assert duties.count(9) == 0
        run = compiled(call, dynamic=True, force_static_compile=False)
        assert torch.equal(run(x), x * 2 + 1)
        assert torch.equal(run(y), y * 2 + 1)
        assert (duties.count(9), card.eager_fallbacks) == (2, 2)
        with forbidden("hpu.sdpa_of_test.default: eager fallback ... symbolic sizes ... (duty 9"):
            compiled(call, dynamic=True, force_static_compile=False, use_eager_fallback=False)(x)


def rows(x: Tensor) -> Tensor:
    return torch.zeros_like(x[:, 0]).long()


def set_columns(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    x[:, index] = values
    return x


FALLBACKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "nonzero": (lambda x: x.nonzero() * 2, "on the list"),
    "bincount": (lambda x: x.flatten().long().bincount() * 2, "on the list"),
    "addcmul": (lambda x: torch.addcmul(x, x, x) * 2, "on the list"),
    "mask": (lambda x: x[x > 0] * 2, "boolean-mask indexing"),
    "masked_select": (lambda x: x.masked_select(x > 0) * 2, "depends on the contents"),
    "not leading": (lambda x: x[:, rows(x)] * 2, "not leading"),
    "index_put": (lambda x: set_columns(x * 2, rows(x), x), "not leading"),
    "int64": (lambda x: x.long().permute(1, 0) + 1, "permute of int64"),
    "bool": (lambda x: torch.full((2,), True, device="hpu") & (x[0, 0] > 0), "a Python bool"),
    "nan": (lambda x: x.masked_fill(x > 1, float("nan")) * 2, "a NaN literal"),
    "constant": (lambda x: x + torch.tensor([1.0], device="hpu"), "a constant of the host"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_eager_fallbacks(name: str, card: Any, duties: Any, forbidden: Any) -> None:
    """Duty 10: it runs, between two clusters."""
    call, why = FALLBACKS[name]
    x = ones(4, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(compiled(call)(x), call(x))
        assert duties.count(10) >= 1
        with forbidden(f"eager fallback inside a region: ... {why} ... (duty 10"):
            compiled(call, use_eager_fallback=False)(x)


def test_the_switch_of_the_environment(monkeypatch: pytest.MonkeyPatch, forbidden: Any) -> None:
    """Duty 10."""
    monkeypatch.setenv("PT_HPU_USE_EAGER_FALLBACK", "0")
    with forbidden("eager fallback inside a region"):
        compiled(lambda x: torch.addcmul(x, x, x))(ones(2))
    assert compiled(lambda x: x[torch.zeros(2, dtype=torch.long, device="hpu")])(ones(2)).tolist() == [1, 1]


def test_index_of_symbolic_size(duties: Any) -> None:
    """Duty 10: even where recipes are static."""
    x, index = ones(4, 4), torch.zeros(3, dtype=torch.long, device="hpu")
    compiled(lambda x, i: x[i] * 2)(x, index)
    compiled(lambda x, i: x.index_select(0, i) * 2, dynamic=True)(x, index)
    assert duties.count(10) == 0
    compiled(lambda x, i: x[i] * 2, dynamic=True)(x, index)
    assert duties.count(10) == 1


def test_fallbacks_cut_regions(card: Any, compilations: Any) -> None:
    """Duty 10."""
    x = ones(3)
    whole = compiled(lambda x: x * 2 + x)
    assert compilations(lambda: whole(x)) == 1
    launches = card.launches
    in_two = compiled(lambda x: torch.addcmul(x * 2, x, x) * 3)
    assert compilations(lambda: in_two(x)) == 3
    assert card.launches - launches == 3


def test_opaque_operators(duties: Any, forbidden: Any) -> None:
    """Duty 11."""
    library = torch.library.Library("sim_opaque", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "HPU")
    library.impl("twice", lambda x: x * 2, "CPU")
    library._register_fake("twice", torch.empty_like)
    call = lambda x: torch.ops.sim_opaque.twice(x) + 1  # noqa: E731
    assert compiled(call)(ones(2)).tolist() == [3, 3]
    assert duties.count(11) == 1
    with forbidden("sim_opaque.twice.default: eager fallback ... opaque operator ... (duty 11"):
        compiled(call, use_eager_fallback=False)(ones(2))


def write(cache: Tensor, index: Tensor, x: Tensor) -> Tensor:
    cache.index_copy_(0, index, x)
    return cache.sum(0)


WRITES: dict[str, tuple[Callable[..., Tensor], int, str]] = {
    "a view": (lambda c, i, x: c[:4].index_copy_(0, i, x).sum(0), 12, "its target is a view"),
    "two writes": (lambda c, i, x: write(c, i, x) + write(c, i + 2, x), 12, "its target is a view or a result"),
    "another user": (lambda c, i, x: c.sum(0) + write(c, i, x), 12, "other users"),
    "eager user": (lambda c, i, x: torch.addcmul(c.index_copy_(0, i, x), c, c).sum(0), 12, "an eager node"),
    "changed again": (lambda c, i, x: c.index_copy_(0, i, x).mul_(2).sum(0), 0, ""),
    "index_put": (lambda c, i, x: c.index_put_((i,), x).sum(0), 13, "clones all of it"),
    "scatter": (lambda c, i, x: c.scatter_(0, i[:, None].expand_as(x), x).sum(0), 13, "clones all of it"),
    "slice": (lambda c, i, x: c[:2].copy_(x) + c.sum(0), 13, "clones all of it"),
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(8, 4, device="hpu"), torch.tensor([1, 3], device="hpu"), ones(2, 4)


def test_the_write_that_costs_nothing(card: Any, duties: Any) -> None:
    """Duty 12: one index_copy_ into an input, of which nothing else reads the old contents."""
    cache, index, x = inputs()
    assert compiled(write)(cache, index, x).tolist() == [2, 2, 2, 2]
    assert cache[:, 0].tolist() == [0, 1, 0, 1, 0, 0, 0, 0]
    assert (card.copied_bytes, duties.count(12), duties.count(13)) == (0, 0, 0)
    compiled(write, use_inplace_index_copy=False)(cache, index, x)
    assert (card.copied_bytes, duties.count(12)) == (cache.nbytes, 1)


@pytest.mark.parametrize("name", WRITES)
def test_writes_that_copy(name: str, card: Any, duties: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Duties 12 and 13: the right contents, at the price of the whole target."""
    call, duty, why = WRITES[name]
    (cache, index, x), (expected, _, _) = inputs(), inputs()
    assert torch.equal(compiled(call)(cache, index, x), call(expected, index, x))
    assert torch.equal(cache, expected)
    if not duty:
        return
    assert duties.count(duty) >= 1
    assert card.copied_bytes >= cache.nbytes
    assert re.search(f"copies its whole target.*{why}", caplog.text)
