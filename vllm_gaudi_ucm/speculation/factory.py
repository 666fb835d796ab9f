"""The proposer that the engine's configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.speculation.ngram import NgramProposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.runner.request_table import RequestTable
    from vllm_gaudi_ucm.speculation.proposer import DraftProposer


def make_proposer(vllm_config: VllmConfig, table: RequestTable) -> DraftProposer | None:
    """None without speculative decoding; features.py lets no other method pass."""
    config = vllm_config.speculative_config
    if config is None:
        return None
    assert config.prompt_lookup_min is not None
    assert config.prompt_lookup_max is not None
    return NgramProposer(table, config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)
