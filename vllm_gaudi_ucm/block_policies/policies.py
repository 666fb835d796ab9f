"""The policies of the KV cache's blocks, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_ucm.config import exclusions
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_config
from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError, shown
from vllm_gaudi_ucm.protocol.memory_orders import MemoryTotals
from vllm_gaudi_ucm.registry import Registry, those_installed

if TYPE_CHECKING:
    from vllm_gaudi_ucm.block_policies.policy import BlockPolicy
    from vllm_gaudi_ucm.vllm_api.scheduling import Scheduler

    Make = Callable[[Scheduler, UcmConfig, MemoryTotals], BlockPolicy | None]

_PLACES = {
    "admission": "vllm_gaudi_ucm.block_policies.admission.admission:make_admission",
    "slots for tokens": "vllm_gaudi_ucm.block_policies.token_slots.token_slots:make_token_slots",
    "partial hits": "vllm_gaudi_ucm.block_policies.partial_hits.partial_hits:make_partial_hits",
    # shortens a hit, which swap may extend
    "kept states": "vllm_gaudi_ucm.block_policies.kept_states.kept_states:make_kept_states",
    "swap": "vllm_gaudi_ucm.block_policies.swap.swaps:make_swap",
    "compaction": "vllm_gaudi_ucm.block_policies.compaction.compaction:make_compaction",
}
POLICIES: Registry[Make] = Registry("policy of the KV cache's blocks", **those_installed(**_PLACES))
"""Policies by the titles of their options in `config.exclusions`. An installation may leave out a policy's folder."""


class BlockPolicies(NamedTuple):
    """The policies that are switched on, and counts of their actions.

    give_orders: whether messages to workers carry orders or counts of them.
    """

    members: tuple[BlockPolicy, ...]
    totals: MemoryTotals
    give_orders: bool

    def named(self, name: str) -> Any:
        """Returns the policy of this name; None if it is off."""
        return next((policy for policy in self.members if policy.name == name), None)


def make_policies(scheduler: Scheduler) -> BlockPolicies:
    """Makes the policies that are switched on. Raises UcmConfigError for one that is not installed."""
    config, totals = resolve_config(scheduler.vllm_config.additional_config), MemoryTotals()
    on = {option.title: option for option in exclusions.POLICIES if option.is_on(config)}
    missing = [option for title, option in on.items() if title not in POLICIES]
    if missing:
        wanted = "leave the option out: the folder of this policy is not installed"
        raise UcmConfigError([Problem(one.key, shown(one.value(config)), wanted) for one in missing])
    made = [POLICIES.get(name)(scheduler, config, totals) for name in POLICIES.names() if name in on]
    members = tuple(policy for policy in made if policy is not None)
    return BlockPolicies(members, totals, exclusions.policies_give_orders(config))
