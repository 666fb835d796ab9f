"""The folder of a policy of the KV cache's blocks can be taken away: the others work, and its option is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.left_out import copy_installed, environment, run_tests
from tests.packaging.source_tree import PACKAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMON = ("tests/engine/test_phases.py", "tests/scheduler/test_scheduler.py")
NEEDS = {
    "tests/block_policies/test_admission.py": {"admission"},
    "tests/block_policies/test_kept_states.py": {"kept_states"},
    "tests/block_policies/test_slot_strips.py": {"token_slots"},
    "tests/scheduler/test_copy_waits.py": {"admission", "partial_hits"},
    "tests/scheduler/test_longest_hit.py": {"partial_hits", "swap"},
    "tests/block_policies/test_pool_machine.py": {"compaction", "partial_hits"},
}
"""Files of quick tests, and the policies that each needs."""
OPTIONS = {
    "admission": ("ucm.scheduler.admission", {"scheduler": {"admission": "exact"}}),
    "token_slots": ("ucm.kv_cache.granularity", {"kv_cache": {"granularity": "token"}}),
    "partial_hits": ("ucm.kv_cache.partial_hits", {"kv_cache": {"partial_hits": True}}),
    "swap": ("ucm.preemption.mode", {"preemption": {"mode": "swap"}}),
    "compaction": ("ucm.kv_cache.compaction", {"kv_cache": {"compaction": True}}),
    "kept_states": ("ucm.kv_cache.kept_states", {"kv_cache": {"kept_states": 8}}),
}
MAKE = """
from types import SimpleNamespace
from vllm_gaudi_ucm.block_policies.policies import make_policies
make_policies(SimpleNamespace(vllm_config=SimpleNamespace(additional_config={"ucm": OPTIONS})))
"""


@pytest.mark.parametrize("policy", OPTIONS)
def test_the_others_work_without_a_policy(policy: str, plain_python: Path, tmp_path: Path) -> None:
    copy = copy_installed(tmp_path / "copy")
    shutil.rmtree(copy / PACKAGE / "block_policies" / policy)
    run_tests(plain_python, copy, *COMMON, *(tests for tests, needed in NEEDS.items() if policy not in needed))
    key, options = OPTIONS[policy]
    script = MAKE.replace("OPTIONS", repr(options))
    done = subprocess.run(
        [str(plain_python), "-c", script], cwd=copy, env=environment(copy), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"{key}: found" in done.stderr
    assert "the folder of this policy is not installed" in done.stderr
