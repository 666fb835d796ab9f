"""The folder of a policy of the KV cache's blocks can be taken away: the others work, and its option is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import permutations
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
import json
from types import SimpleNamespace
from vllm_gaudi_ucm.block_policies.policies import make_policies

def refusal(options):
    try:
        make_policies(SimpleNamespace(vllm_config=SimpleNamespace(additional_config={"ucm": options})))
    except ValueError as error:
        return str(error)

print(json.dumps([refusal(options) for options in OPTIONS]))
"""


LEFT_OUT = (
    ("admission", "token_slots", "partial_hits"),
    ("admission", "swap", "compaction"),
    ("token_slots", "swap", "kept_states"),
    ("partial_hits", "compaction", "kept_states"),
)
"""For any two policies, one of these has the first and lacks the second."""


@pytest.mark.parametrize("policies", LEFT_OUT, ids="-".join)
def test_the_others_work_without_some(policies: tuple[str, ...], plain_python: Path, tmp_path: Path) -> None:
    copy = copy_installed(tmp_path / "copy")
    for policy in policies:
        shutil.rmtree(copy / PACKAGE / "block_policies" / policy)
    run_tests(plain_python, copy, *COMMON, *(tests for tests, needed in NEEDS.items() if not needed & {*policies}))
    script = MAKE.replace("OPTIONS", repr([OPTIONS[policy][1] for policy in policies]))
    done = subprocess.run(
        [str(plain_python), "-c", script], cwd=copy, env=environment(copy), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refusals = json.loads(done.stdout.splitlines()[-1])
    for policy, refusal in zip(policies, refusals, strict=True):
        assert f"{OPTIONS[policy][0]}: found" in refusal
        assert "the folder of this policy is not installed" in refusal


def test_each_policy_is_left_out_without_each_other() -> None:
    assert all(any(one in left and other not in left for left in LEFT_OUT) for one, other in permutations(OPTIONS, 2))
