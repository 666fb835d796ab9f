"""Where the proposer of drafts is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_ucm.batch.request_table import RequestTable
from vllm_gaudi_ucm.execution.decoder import Decoder
from vllm_gaudi_ucm.execution.true_shape_execution import TrueShapeExecution
from vllm_gaudi_ucm.observability.host_work import HostWork
from vllm_gaudi_ucm.runner.parts import TOO_MANY_BLOCKS
from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
from vllm_gaudi_ucm.speculation.draft_model import DraftModelProposer
from vllm_gaudi_ucm.speculation.proposer import NgramProposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_ucm.attention.groups import LayerGroups
    from vllm_gaudi_ucm.config.sections import AttentionConfig
    from vllm_gaudi_ucm.execution.carried_tokens import CarriedTokens
    from vllm_gaudi_ucm.execution.cpu.native_graphs import NativeGraphs
    from vllm_gaudi_ucm.speculation.drafts_ahead import DraftsAhead
    from vllm_gaudi_ucm.speculation.proposer import DraftProposer


def make_proposer(
    vllm_config: VllmConfig,
    attention: AttentionConfig,
    draft_model: Decoder | None,
    table: RequestTable,
    block_size: int,
    device: torch.device,
    host: HostWork,
    static: StaticShapes | None = None,
    graphs: NativeGraphs | None = None,
    carried: CarriedTokens | None = None,
    ahead: DraftsAhead | None = None,
    groups: LayerGroups | None = None,
) -> DraftProposer | None:
    """None without speculative decoding; features.py lets no other method pass.

    Args:
        vllm_config: the engine's.
        attention: kernels of a draft model, the target's.
        draft_model: where the method has one.
        table: the requests.
        block_size: tokens per cache block.
        device: where the draft model runs.
        host: counts what is waited for, and what runs on the host.
        static: the engine's static shapes with the draft model's graphs; None: steps run at true shapes.
        graphs: of the draft model's steps at true shapes, on a CPU.
        carried, ahead: with asynchronous scheduling, where a draft model's drafts stay.
        groups: of the draft model's layers, where there is one.
    """
    config = vllm_config.speculative_config
    if config is None:
        return None
    if draft_model is not None:
        assert groups is not None, "a draft model has layers"
        longest = config.draft_model_config.max_model_len
        if static is None:
            execution = TrueShapeExecution(
                draft_model, attention, block_size, device, graphs=graphs, carried=carried, groups=groups
            )
            return DraftModelProposer(execution, table, block_size, longest, groups=groups.groups, ahead=ahead)
        return _draft_model_at_static_shapes(static, groups, table, block_size, longest, host, ahead)
    assert config.prompt_lookup_min is not None
    assert config.prompt_lookup_max is not None
    return NgramProposer(table, config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max, host)


def _draft_model_at_static_shapes(
    static: StaticShapes,
    groups: LayerGroups,
    table: RequestTable,
    block_size: int,
    max_model_len: int,
    host: HostWork,
    ahead: DraftsAhead | None,
) -> DraftModelProposer:
    graphs = static.draft_model
    assert graphs is not None, "static shapes without the draft model"

    def divided() -> None:
        static.bypassed(f"pass of the draft model divided: {TOO_MANY_BLOCKS}")

    return DraftModelProposer(
        graphs.execution, table, block_size, max_model_len, graphs.likeliest, divided, host, groups.groups, ahead
    )
