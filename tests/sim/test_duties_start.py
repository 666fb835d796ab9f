"""Duties 1 to 6, 23 to 25 and 33: how the bridge starts, what eager mode lacks, and the compiler's own limits."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.sim.forks import CHILDREN, Program, in_forks
from tests.sim.regions import compiled
from tests.sim_path import SIM_PATH, played_release

MODULES = (
    *("core", "hpu", "hpu.metrics", "utils.internal", "utils.experimental", "internal.bridge_config", "hpex.kernels"),
    *("hpex.normalization", "distributed.hccl"),
)


def run_python(program: str, **env: str) -> str:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{SIM_PATH}:{CHILDREN}", **env}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()


def test_import_torch_suffices() -> None:
    """Duty 1; duty 2: eager mode is the default."""
    imports = "".join(f"import habana_frameworks.torch.{name}\n" for name in MODULES)
    program = f"""
import torch
print(torch.hpu.is_available(), torch.ones(1, device="hpu").device)
{imports}
from habana_frameworks.torch.utils.internal import is_lazy
import importlib.metadata
print(is_lazy(), importlib.metadata.version("habana-torch-plugin"))
"""
    builds = {"1.24.1": "1.24.1.482", "1.24.2": "1.24.2"}  # the fourth number of 1.24.2 is not known
    assert run_python(program) == f"True hpu:0\nFalse {builds[played_release(torch.__version__)]}"


@pytest.mark.slow
def test_lazy_mode_needs_the_fork() -> None:
    """Duty 2."""
    program = "import habana_frameworks.torch.utils.internal as i; print(i.is_lazy())"
    environments = {
        "off": {"PT_HPU_LAZY_MODE": "0"},
        "upstream": {"PT_HPU_LAZY_MODE": "1"},
        "fork": {"PT_HPU_LAZY_MODE": "1", "SIM_HPU_TORCH_FORK": "1"},
    }
    programs = {name: Program(program, env) for name, env in environments.items()}
    found = in_forks(programs, {"PATH": os.environ["PATH"]})
    assert found["off"] == ["False", "done"]
    assert "lazy mode needs the vendor's fork of torch" in found["upstream"][-1]
    assert found["fork"] == ["True", "done"]


@pytest.mark.parametrize("name", ["wrap_in_hpu_graph", "HPUGraph"])
def test_no_hpu_graphs_in_eager_mode(name: str, ht: Any, forbidden: Any) -> None:
    """Duty 3."""
    assert not hasattr(torch.hpu, name)
    with forbidden(f"torch.hpu.{name}: there are no HPU graphs in eager mode (duty 3"):
        getattr(ht.hpu, name)
    with pytest.raises(AttributeError):
        getattr(torch.hpu, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = torch.hpu.no_such_name


def test_mark_step_does_nothing(ht: Any, card: Any) -> None:
    """Duty 4: no cut, and no break of a graph."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ht.core.mark_step()
        return y * 2

    x = torch.ones(3, device="hpu")
    launches = card.launches
    ht.core.mark_step()
    assert card.launches == launches
    assert compiled(forward)(x).tolist() == [4, 4, 4]
    assert (card.compiled_graphs, card.mark_steps) == (1, 0)


def test_pinning_needs_a_started_device() -> None:
    """Duty 33."""
    program = """
import torch
from habana_frameworks.torch.simulator import HpuConstraintError, duties
calls = lambda: torch.ones(1).pin_memory(), lambda: torch.ones(1, pin_memory=True)
for call in calls:
    with duties.without(33):
        call()
    try:
        call()
    except HpuConstraintError as error:
        print(error.operator, error.finding)
torch.ones(1, device="hpu")
print([call().tolist() for call in calls])
"""
    refused = "pin_memory nothing was put on the card yet, and its allocator pins\n"
    assert run_python(program) == f"{refused}{refused}[[1.0], [1.0]]"


@pytest.mark.parametrize("options", [{"force_static_compile": True}, {"keep_input_mutations": True, "inference": True}])
def test_known_options(options: dict[str, bool]) -> None:
    """Duty 6."""
    assert compiled(lambda x: x + 1, **options)(torch.ones(1, device="hpu")).tolist() == [2]


def test_unknown_options() -> None:
    """Duty 6."""
    assert "hpu_backend" in torch._dynamo.list_backends(exclude_tags=())
    with pytest.raises(Exception, match=r"options .*max_autotune.* are unknown.*duty 6"):
        compiled(lambda x: x + 1, max_autotune=True)(torch.ones(3, device="hpu"))


def test_regions_are_functionalised(card: Any) -> None:
    """Duty 6: what a region mutates it makes anew; the write to an input arrives in the end."""

    def forward(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[1:].mul_(3)
        cache.add_(y)
        return y

    x, cache = torch.ones(3, device="hpu"), torch.ones(3, device="hpu")
    assert compiled(forward)(x, cache).tolist() == [1, 3, 3]
    assert (x.tolist(), cache.tolist()) == ([1, 1, 1], [2, 4, 4])


def test_settings_of_the_bridge() -> None:
    """Duty 23."""
    from habana_frameworks.torch.internal.bridge_config import compile_only, env_setting

    with pytest.raises(KeyError, match="PT_HPU_LAZY_MODE"), env_setting("PT_HPU_LAZY_MODE", True):
        pass
    with env_setting("PT_ENABLE_INT64_SUPPORT", True), env_setting("PT_COMPILE_ONLY_MODE", True):
        assert compile_only()
    assert not compile_only()
    with pytest.raises(ValueError, match="boom"), env_setting("PT_COMPILE_ONLY_MODE", True):
        raise ValueError("boom")
    assert compile_only(), "the bridge does not restore it after an exception"


def test_no_compilation_after_warm_up(card: Any) -> None:
    """Duty 24."""
    run = compiled(lambda x: x + 1)
    run(torch.ones(3, device="hpu"))
    torch.compiler.set_stance(skip_guard_eval_unsafe=True)
    try:
        assert run(torch.ones(3, device="hpu")).tolist() == [2, 2, 2]
        with pytest.raises(Exception, match=r"skip_guard_eval_unsafe"):
            run(torch.ones(4, device="hpu"))
        with pytest.raises(Exception, match=r"skip_guard_eval_unsafe"):
            torch.compile(lambda x: x - 1, backend="hpu_backend", dynamic=False)(torch.ones(3, device="hpu"))
    finally:
        torch.compiler.set_stance("default")
    assert card.compiled_graphs == 1


def test_more_shapes_than_dynamo_keeps(card: Any, duties: Any) -> None:
    """Duty 25: beyond the limit nothing is compiled."""
    with torch._dynamo.config.patch(recompile_limit=2):
        run = compiled(lambda x: x + 1, fullgraph=False)
        for size in (2, 3):
            run(torch.ones(size, device="hpu"))
        assert duties.count(25) == 0
        assert run(torch.ones(4, device="hpu")).tolist() == [2, 2, 2, 2]
    assert duties.count(25) == 1
    assert card.compiled_graphs == 2
