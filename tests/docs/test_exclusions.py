"""The matrix of docs/memory.md says of each pair what the table of exclusions says."""

from __future__ import annotations

import re

from tests.docs.commands import ROOT
from vllm_gaudi_ucm.config.exclusions import OF_ENGINE, OF_OPTIONS, POLICIES

NEEDED = "prefix cache"
ONCE_LAYERS_ARE_MADE = {(policy, "several KV-cache groups") for policy in ("slots for tokens", "kept states")}
"""Refused by the worker, which sees the windows of a model, or by the scheduler, which sees its groups."""


def matrix() -> dict[tuple[str, str], str]:
    """(policy, feature) to a cell."""
    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").partition("## What goes together\n\n")[2]
    head, _, *rows = (line.strip("| ").split(" | ") for line in text.partition("\n\n")[0].splitlines())
    found = {}
    for name, *cells in rows:
        title = re.sub(r"\[(.*)\]\(.*\)", r"\1", re.sub(r".*\((contiguous reads)\)", r"\1", name))
        # the last cell of the last row, a policy with itself, is empty
        found |= {(policy, title): cell for policy, cell in zip(head, cells, strict=False)}
    return found


def excluded() -> set[tuple[str, str]]:
    """(policy, feature) that do not go together."""
    policies = {policy.title for policy in POLICIES}
    pairs = {(one.refused.title, one.excluded_by.title) for one in OF_OPTIONS}
    pairs |= {(other, refused) for refused, other in pairs if refused not in policies}
    pairs |= {(one.policy.title, one.title) for one in OF_ENGINE if one.title}
    return {pair for pair in pairs if pair[0] in policies} | ONCE_LAYERS_ARE_MADE


def test_every_policy_has_a_column() -> None:
    assert {policy for policy, _ in matrix()} == {policy.title for policy in POLICIES}


def test_every_exclusion_is_in_the_matrix() -> None:
    assert excluded() <= matrix().keys()


def test_the_matrix_says_what_the_table_says() -> None:
    wrong = {}
    for pair, cell in matrix().items():
        wanted = "yes" if pair not in excluded() else "needed" if pair[1] == NEEDED else "no"
        if not cell.startswith(wanted):
            wrong[pair] = cell
    assert not wrong
