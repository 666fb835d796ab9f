"""The interface: roles, defaults, and that importing it is light."""

import subprocess
import sys
from typing import Any

import pytest

from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.protocol.sparse_meta import SparseMeta
from vllm_gaudi_ucm.sparse.base import (
    INVALID_SLOT,
    SCHEDULER_HOOKS,
    WORKER_HOOKS,
    SparseRoleError,
    UcmSparseBase,
    UcmSparseRole,
)
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory

CHECK = """
import sys
import vllm_gaudi_ucm.sparse.base, vllm_gaudi_ucm.sparse.factory, vllm_gaudi_ucm.config.ucm_config
config = vllm_gaudi_ucm.config.ucm_config.resolve_config({"ucm": {"ucm_sparse_method": "KVStar"}})
vllm_gaudi_ucm.sparse.factory.UcmSparseFactory.create_sparse_method(
    "KVStar", vllm_gaudi_ucm.sparse.base.UcmSparseRole.SCHEDULER, config)
print(sorted({"vllm", "torch", "triton", "habana_frameworks", "numpy"} & set(sys.modules)))
"""
REQUEST: Any = None


def test_default_leaves_every_request_alone() -> None:
    """covers: C21"""
    base = UcmSparseBase(UcmSparseRole.SCHEDULER)
    base.register_block_size(16)
    base.request_begin("a", [1, 2])
    assert base.estimate_num_slots_sparsed(REQUEST) == INVALID_SLOT == -1
    assert base.build_sparse_meta(REQUEST, {}) == SparseMeta()
    base.drafts_verified("a", 4, 2)
    base.request_preempted("a")
    base.request_finished_in_scheduler("a")
    with pytest.raises(NotImplementedError, match="expected INVALID_SLOT"):
        base.allocate_slots(REQUEST, 3)


def test_default_passes_every_tensor_through() -> None:
    base: Any = UcmSparseBase(UcmSparseRole.WORKER)
    base.register_kv_caches({})
    base.update_states(REQUEST)
    base.execute_begin(REQUEST)
    assert base.attention_begin(0, "q", "k", "v", "metadata") == ("q", "k", "v", None)
    assert base.attention_begin(0, "q", "k", "v", "metadata", output="o") == ("q", "k", "v", "o")
    assert base.attention_finished(0, "o") == "o"
    base.execute_finished()
    base.request_finished_in_worker("a")


@pytest.mark.parametrize("name", ["GSA", "ESA", "KVStar"])
@pytest.mark.parametrize("role", list(UcmSparseRole))
def test_hook_of_the_other_role_is_named(name: str, role: UcmSparseRole) -> None:
    method = UcmSparseFactory.create_sparse_method(name, role)
    is_scheduler = role is UcmSparseRole.SCHEDULER
    for hook in WORKER_HOOKS if is_scheduler else SCHEDULER_HOOKS:
        with pytest.raises(SparseRoleError, match=rf"{name}\.{hook}: found an object of the role {role.name}"):
            getattr(method, hook)("anything", 3)


def test_hooks_are_all_hooks_of_the_class() -> None:
    public = {name for name, value in vars(UcmSparseBase).items() if callable(value) and not name.startswith("_")}
    assert public - {"Options"} == {*SCHEDULER_HOOKS, *WORKER_HOOKS}


def test_options_of_a_method_without_options() -> None:
    with pytest.raises(UcmConfigError, match="UcmSparseBase: found 3, expected an empty mapping"):
        UcmSparseBase(UcmSparseRole.WORKER, 3)  # type: ignore[arg-type]


def test_import_is_light() -> None:
    """The front end, the command line and third parties read configurations without the engine."""
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
