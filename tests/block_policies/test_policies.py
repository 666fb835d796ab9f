"""Policies of the KV cache's blocks: one table, one loop, and nothing outside that knows one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.architecture.sources import imported, sources
from tests.block_policies.histories import make_request, make_vllm_manager
from vllm_gaudi_ucm.block_policies import policies
from vllm_gaudi_ucm.block_policies.policy import BlockPolicy, Turn
from vllm_gaudi_ucm.config import exclusions
from vllm_gaudi_ucm.options.errors import UcmConfigError
from vllm_gaudi_ucm.registry import Registry
from vllm_gaudi_ucm.scheduler.block_manager import BlockManager

BLOCK = 4


class Told(BlockPolicy):
    """Records its calls; returns True unless it is named in `no`."""

    def __init__(self, name: str, notes: list[str], no: str = "") -> None:
        self.name = name
        self.notes = notes
        self.no = no

    def _asked(self, what: str) -> bool:
        self.notes.append(f"{self.name} {what}")
        return self.no != what

    def may_begin(self, turn: Turn) -> bool:
        return self._asked("may_begin")

    def reserve(self, turn: Turn) -> bool:
        return self._asked("reserve")

    def given(self, turn: Turn) -> None:
        self._asked("given")

    def not_given(self, turn: Turn) -> None:
        self._asked("not_given")


def told(no: str, tokens: int = 6) -> tuple[list[str], bool]:
    """Returns the calls of two policies, of which the second refuses a request, and whether it got blocks."""
    notes: list[str] = []
    manager = BlockManager.from_manager(
        make_vllm_manager(8, BLOCK, 40, True), [Told("first", notes), Told("second", notes, no)]
    )
    manager.new_step_starts()
    request = make_request("request", list(range(tokens)), BLOCK)
    return notes, manager.allocate_slots(request, tokens) is not None


def test_every_policy_is_asked_and_told_in_turn() -> None:
    asked = ["first may_begin", "second may_begin", "first reserve", "second reserve"]
    assert told("nothing") == ([*asked, "first given", "second given"], True)


def test_a_policy_that_says_no_ends_the_turn() -> None:
    """Policies that were asked before it free what they chose."""
    assert told("may_begin") == (["first may_begin", "second may_begin"], False)
    asked = ["first may_begin", "second may_begin", "first reserve", "second reserve"]
    assert told("reserve") == ([*asked, "first not_given"], False)
    # 40 tokens in seven blocks
    assert told("nothing", tokens=40) == ([*asked, "first not_given", "second not_given"], False)


def test_every_option_has_a_policy_and_a_folder() -> None:
    assert set(policies.POLICIES.names()) == {option.title for option in exclusions.POLICIES}
    assert all(callable(policies.POLICIES.get(name)) for name in policies.POLICIES.names())


def test_no_other_room_imports_a_policy() -> None:
    """But the table and the hooks."""
    folders = {".".join(entry.place.split(".")[:3]) for entry in policies.POLICIES.entries()}
    wrong = {
        str(file): name
        for room, file in sources()
        if room != "block_policies"
        for name in imported(file)
        if ".".join(name.split(".")[:3]) in folders
    }
    assert len(folders) == len(exclusions.POLICIES)
    assert not wrong


def test_an_option_without_its_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the folder."""
    monkeypatch.setattr(policies, "POLICIES", Registry("policy", swap="somewhere:make_swap"))
    config = {"ucm": {"kv_cache": {"compaction": True, "partial_hits": True}}}
    scheduler = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=config))
    with pytest.raises(UcmConfigError) as caught:
        policies.make_policies(cast(Any, scheduler))
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["ucm.kv_cache.partial_hits", "ucm.kv_cache.compaction"]
    assert "not installed" in str(caught.value)
