"""The table of what the code uses of vLLM, the installed vLLM, and the code agree. Everything is read as source."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.drift.contracts import ACCEPTED, CONDITIONS, Contract, load
from scripts.drift.findings import Comparison, Finding
from scripts.drift.source_distribution import installed_sources
from scripts.drift.source_tree import SourceTree
from scripts.drift.table import Rows, Version
from scripts.drift.uses import Uses, find_uses, our_sources

REFRESH = "; `make contracts` writes the table anew"
PLANTED = (
    # file, what stands there, what replaces it
    ("v1/core/sched/scheduler.py", "def _preempt_request(", "def _put_back_request("),
    ("v1/core/kv_cache_manager.py", "def new_step_starts(self)", "def new_step_starts(self, step: int)"),
    ("v1/core/block_pool.py", "def evict_blocks(self, ", "def evict_blocks(self, reason: str, "),
    ("v1/core/kv_cache_utils.py", "def generate_block_hash_extra_keys(", "def extra_keys_of_block_hash("),
    (
        "v1/core/kv_cache_manager.py",
        "def get_blocks(self, request_id: str)",
        "def get_blocks(self, request_id: str, soon=False)",
    ),
    ("v1/request.py", "self.num_computed_tokens", "self.num_tokens_computed"),
)
ABSTRACT = (
    "    @abstractmethod\n    def get_num_new_matched_tokens(",
    "    @abstractmethod\n    def describe_store(self) -> str: ...\n\n"
    "    @abstractmethod\n    def get_num_new_matched_tokens(",
)


@pytest.fixture(scope="module")
def installed() -> SourceTree:
    tree = installed_sources()
    assert tree is not None, "vLLM is not installed"
    return tree


@pytest.fixture(scope="module")
def uses(installed: SourceTree) -> Uses:
    return find_uses(our_sources(), installed)


@pytest.fixture(scope="module")
def rows(installed: SourceTree, uses: Uses) -> dict[tuple[str, str], Contract]:
    """What the table would be for the installed vLLM alone."""
    return Rows([(installed, uses)]).contracts()


def findings(tree: SourceTree, uses: Uses) -> list[Finding]:
    """As `make drift` finds them."""
    table = load()
    return Comparison(table, Version(tree, table.values()), uses).findings()


def told(found: Sequence[Finding]) -> str:
    return "\n".join(f"{one.name}: {one.says} ({', '.join(one.places)})" for one in found)


def test_the_installed_vllm_is_as_the_table_says(installed: SourceTree, uses: Uses) -> None:
    """Every name, member and signature; every override takes vLLM's calls; nothing abstract is left open."""
    assert not (found := findings(installed, uses)), told(found)


def test_the_table_has_what_the_code_uses(rows: dict[tuple[str, str], Contract]) -> None:
    table = load()
    lacking = sorted(row.full_name for key, row in rows.items() if key not in table)
    assert not lacking, f"not in the table: {lacking}{REFRESH}"
    others = {
        row.full_name: (row.users, table[key].users)
        for key, row in rows.items()
        if not _users(row) <= _users(table[key]) or row.is_optional < table[key].is_optional
    }
    assert not others, f"the table has other users (code, table): {others}{REFRESH}"


def test_the_code_uses_what_the_table_has(
    installed: SourceTree, uses: Uses, rows: dict[tuple[str, str], Contract]
) -> None:
    """Rows of another version stay: the installed one does not have their names, or does not tell their types."""
    table = load()
    version = Version(installed, table.values())
    unused = [
        row.full_name
        for key, row in table.items()
        if key not in rows and version.described(row.name, row.member) is not None and not row.is_optional
    ]
    assert not unused, f"nothing uses {unused}{REFRESH}"


def _users(row: Contract) -> set[tuple[str, str]]:
    return {(how, file) for how, files in row.users for file in files}


def test_the_table_is_as_large_as_the_use() -> None:
    """The tests above would pass if nothing were found."""
    table = load()
    ways = {how for row in table.values() for how, _ in row.users}
    assert ways == {"imports", "derives", "overrides", "calls", "constructs", "reads", "writes"}
    assert len(table) > 800
    assert ("vllm.v1.core.sched.scheduler.Scheduler", "_preempt_request") in table, "a private method"
    assert ("vllm.config.parallel.ParallelConfig", "pipeline_parallel_size") in table, "read in a lambda of a table"
    assert ("vllm.config.model.ModelConfig", "code_revision") in table, "read by getattr, from a list of names"


def test_conditions_are_about_rows() -> None:
    names = {row.full_name for row in load().values()}
    assert set(CONDITIONS) <= names, "remove what nothing uses"
    assert all(len(reason) > 20 for reason in (*CONDITIONS.values(), *ACCEPTED.values()))


def copy_with_changes(installed: SourceTree, folder: Path) -> Path:
    """A copy of vLLM's sources in which a few things have changed, as in a later version."""
    (source,) = installed.folders.values()
    others = shutil.ignore_patterns("*.so", "__pycache__", "*.json", "models", "third_party")
    shutil.copytree(source, folder / "vllm", ignore=others)
    (folder / "vllm/model_executor/models").symlink_to(source / "model_executor/models")
    connector = "distributed/kv_transfer/kv_connector/v1/base.py"
    for name, before, after in (*PLANTED, (connector, *ABSTRACT)):
        file = folder / "vllm" / name
        text = file.read_text(encoding="utf-8")
        assert before in text, f"{name} has no {before}: plant something else"
        file.write_text(text.replace(before, after), encoding="utf-8")
    return folder


Planted = Callable[[str], list[Finding]]


@pytest.fixture(scope="module")
def planted(installed: SourceTree, uses: Uses, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Findings about a name."""
    folder = copy_with_changes(installed, tmp_path_factory.mktemp("changed"))
    found = findings(SourceTree({"vllm": folder / "vllm"}), uses)
    return lambda name: [one for one in found if one.name == name]


def test_a_renamed_method_is_named(planted: Planted) -> None:
    """With its new name, by its signature, and with the code that overrides it."""
    (finding,) = planted("vllm.v1.core.sched.scheduler.Scheduler._preempt_request")
    assert (finding.kind, finding.is_broken) == ("vanished", True)
    assert "_put_back_request" in finding.says
    assert any(place.startswith("vllm_gaudi_ucm/scheduler/") and "overrides" in place for place in finding.places)


def test_a_renamed_function_is_named(planted: Planted) -> None:
    (finding,) = planted("vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys")
    assert (finding.kind, finding.is_broken) == ("vanished", True)
    assert any("vllm_gaudi_ucm/vllm_api/scheduling.py" in place for place in finding.places)


def test_a_renamed_attribute_is_named(planted: Planted) -> None:
    (finding,) = planted("vllm.v1.request.Request.num_computed_tokens")
    assert finding.is_broken
    assert "num_tokens_computed" in finding.says
    assert len(finding.places) > 5


def test_a_new_parameter_of_an_overridden_method_is_named(planted: Planted) -> None:
    found = planted("vllm.v1.core.kv_cache_manager.KVCacheManager.new_step_starts")
    assert any(one.is_broken and "does not take the parameter step" in one.says for one in found)


def test_a_new_parameter_of_a_called_method_is_named(planted: Planted) -> None:
    """One without a default breaks the call, one with a default does not."""
    (finding,) = planted("vllm.v1.core.block_pool.BlockPool.evict_blocks")
    assert finding.is_broken
    assert "vllm_gaudi_ucm/vllm_api/blocks.py" in finding.says
    (finding,) = planted("vllm.v1.core.kv_cache_manager.KVCacheManager.get_blocks")
    assert not finding.is_broken
    assert "Parameter soon: new" in finding.says


def test_a_new_abstract_method_is_named(planted: Planted) -> None:
    found = planted("vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.describe_store")
    assert {one.kind for one in found} == {"abstract"}
    assert any("connector.connector.UcmConnector does not define" in one.says for one in found)
