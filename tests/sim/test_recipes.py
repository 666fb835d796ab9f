"""Recipes in lazy mode: what is one, what makes a new one, and the bridge's metric of compilations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

PT_HPU_LAZY_MODE = "1"


def step(x: Tensor, factor: float = 2.0) -> Tensor:
    return (x * factor + 1).relu()


@pytest.fixture
def mark_step(ht: Any) -> Any:
    return ht.core.mark_step if ht is not None else None


def test_a_stream_compiles_once(mark_step: Any, card: Any, compilations: Any) -> None:
    x, y = torch.empty(4, device="hpu"), torch.empty(4, device="hpu")

    def run(x: Tensor) -> None:
        step(x)
        mark_step()

    assert compilations(lambda: run(x)) == 1
    assert compilations(lambda: run(x)) == 0
    assert compilations(lambda: run(y)) == 0, "other contents at another address"
    assert (card.compilations, card.launches, card.mark_steps) == (1, 3, 3)


def test_mark_step_cuts(mark_step: Any, card: Any, compilations: Any) -> None:
    x = torch.empty(4, device="hpu")

    def run() -> None:
        y = x * 2
        mark_step()
        y + 1
        mark_step()
        mark_step()  # nothing has accumulated

    assert compilations(run) == 2
    assert card.launches == 2
    assert compilations(lambda: (x * 2) + 1) == 1, "both in one stream are a third recipe"


NEW: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "shape": (lambda: torch.empty(4, device="hpu") + 1, lambda: torch.empty(5, device="hpu") + 1),
    "dtype": (
        lambda: torch.empty(4, device="hpu") + 1,
        lambda: torch.empty(4, device="hpu", dtype=torch.bfloat16) + 1,
    ),
    "stride": (lambda: torch.empty(4, 4, device="hpu") + 1, lambda: torch.empty(4, 4, device="hpu").t() + 1),
    "scalar": (lambda: torch.empty(4, device="hpu") * 0.7, lambda: torch.empty(4, device="hpu") * 0.8),
    "number of the host": (
        lambda: torch.empty(4, device="hpu") * torch.tensor(0.7),
        lambda: torch.empty(4, device="hpu") * torch.tensor(0.8),
    ),
    "operator": (lambda: torch.empty(4, device="hpu").sin(), lambda: torch.empty(4, device="hpu").cos()),
    "view": (lambda: torch.empty(4, device="hpu")[:2] + 1, lambda: torch.empty(4, device="hpu")[2:] + 1),
    "size of a factory": (lambda: torch.zeros(3, device="hpu"), lambda: torch.zeros(4, device="hpu")),
    "order": (
        lambda: (torch.empty(4, device="hpu").sin(), torch.empty(4, device="hpu").cos()),
        lambda: (torch.empty(4, device="hpu").cos(), torch.empty(4, device="hpu").sin()),
    ),
    "data flow": (
        lambda: ((x := torch.empty(4, device="hpu")).sin(), x.cos()),
        lambda: torch.empty(4, device="hpu").sin().cos(),
    ),
    "aliasing": (
        lambda: (x := torch.empty(4, device="hpu")) + x,
        lambda: torch.empty(4, device="hpu") + torch.empty(4, device="hpu"),
    ),
}


@pytest.mark.parametrize("name", NEW)
def test_what_makes_a_new_recipe(name: str, compilations: Any) -> None:
    one, other = NEW[name]
    assert compilations(one) == 1
    assert compilations(one) == 0
    assert compilations(other) == 1


def test_what_is_no_recipe(compilations: Any) -> None:
    x = torch.ones(4, device="hpu")
    host = torch.ones(4)

    def run() -> None:
        x.copy_(host)
        host.to("hpu").view(2, 2)[0].t()
        torch.tensor([1, 2, 3], device="hpu")
        torch.empty(7, device="hpu")
        torch.arange(9) + 1
        x.cpu()

    compilations(lambda: None)
    assert compilations(run) == 0


@pytest.mark.parametrize("read", [lambda x: x.sum(), lambda x: x])
def test_host_reads_cut(read: Callable[[Tensor], Tensor], card: Any, compilations: Any) -> None:
    x = torch.ones(4, device="hpu")

    def run() -> None:
        read(x * 3).tolist()
        read(x * 3).tolist()

    compilations(lambda: None)
    launches, reads = card.launches, card.host_reads
    assert compilations(run) == 1
    assert card.launches - launches == 2
    assert card.host_reads - reads == 2


def test_synchronize_and_events_cut(ht: Any, card: Any) -> None:
    x = torch.empty(4, device="hpu")
    for cut in (ht.hpu.synchronize, ht.hpu.Event().record, ht.hpu.current_stream().synchronize):
        launches = card.launches
        x + 1
        cut()
        assert card.launches == launches + 1


def test_captures_are_compilations(ht: Any, compilations: Any) -> None:
    run = ht.hpu.wrap_in_hpu_graph(step)
    inputs = [torch.empty(size, device="hpu") for size in (3, 4, 3, 4)]
    assert [compilations(lambda x=x: run(x)) for x in inputs] == [1, 1, 0, 0]
    assert compilations(lambda: ht.hpu.wrap_in_hpu_graph(step)(inputs[0])) == 0, "the same recipe once more"


def test_a_region_is_one_recipe(ht: Any, mark_step: Any, card: Any, compilations: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        y = x + 1
        mark_step()
        return y * 2

    x = torch.empty(4, device="hpu")
    pending = lambda: x - 1  # noqa: E731
    run = ht.hpu.wrap_in_hpu_graph(forward)
    assert compilations(lambda: (pending(), run(x))) == 2, "what has accumulated is launched first, on its own"
    assert (card.captures, card.launches) == (1, 1)


def test_metric(ht: Any, card: Any) -> None:
    from habana_frameworks.torch.hpu.metrics import metric_global, metric_localcontext

    x = torch.empty(4, device="hpu")
    x + 0.25  # before: not counted inside
    with metric_localcontext("graph_compilation") as outer:
        x + 0.5
        with metric_localcontext("graph_compilation") as inner:
            x + 0.75
        x + 1.0
    assert inner.stats()[0] == ("TotalNumber", 1)
    assert dict(outer.stats()) == {
        "TotalNumber": 3,
        "TotalTime": 3 * (card.compilation_us + card.operator_us),
        "AvgTime": card.compilation_us + card.operator_us,
    }
    assert dict(metric_global("graph_compilation").stats())["TotalNumber"] == 4
    with pytest.raises(Exception, match="unknown"), metric_localcontext("unknown"):
        pass


def test_compile_only(ht: Any, card: Any, compilations: Any) -> None:
    """Compiles every recipe, writes nothing. covers: B6"""
    from habana_frameworks.torch.internal.bridge_config import env_setting

    cache = torch.zeros(4, device="hpu")

    def forward(x: Tensor) -> Tensor:
        cache.add_(x)
        return x * 2

    run = ht.hpu.wrap_in_hpu_graph(forward)
    x = torch.ones(4, device="hpu")
    compilations(lambda: None)
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        assert compilations(lambda: run(x)) == 1
        run(x)
    assert cache.tolist() == [0, 0, 0, 0]
    assert compilations(lambda: run(x)) == 0
    assert run(x).tolist() == [2, 2, 2, 2]
    assert cache.tolist() == [2, 2, 2, 2], "two replays outside"
    with pytest.raises(KeyError, match="PT_UNKNOWN"), env_setting("PT_UNKNOWN", True):
        pass


@pytest.mark.parametrize("config", [",false,1", "a,maybe,1", "a,false,many", "a,false,1,2"])
def test_bad_recipe_cache(config: str) -> None:
    from habana_frameworks.torch.simulator.recipes import RecipeFolder

    with pytest.raises(
        ValueError, match=r"PT_HPU_RECIPE_CACHE_CONFIG: found .* expected 'path,delete_on_exit,size_mb'"
    ):
        RecipeFolder(config)


def test_size_of_the_recipe_cache(tmp_path: Path, card: Any) -> None:
    """Beyond the limit the oldest recipe goes."""
    from habana_frameworks.torch.simulator.recipes import RecipeFolder

    card.recipe_bytes = 1 << 20
    folder = RecipeFolder(f"{tmp_path},false,2")
    for key in ("a", "b", "c"):
        folder.add(key)
    assert [folder.holds(key) for key in ("a", "b", "c")] == [False, True, True]
