"""Makes the proposer of drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.execution.true_shape_execution import TrueShapeExecution
from vllm_gaudi_ucm.runner.parts import TOO_MANY_BLOCKS
from vllm_gaudi_ucm.speculation.draft_model import DraftModelProposer
from vllm_gaudi_ucm.speculation.proposer import NgramProposer

if TYPE_CHECKING:
    from vllm_gaudi_ucm.execution.cpu.native_graphs import NativeGraphs
    from vllm_gaudi_ucm.runner.loaded_model import AllocatedModel
    from vllm_gaudi_ucm.runner.static_shapes import StaticShapes
    from vllm_gaudi_ucm.speculation.proposer import DraftProposer


def make_proposer(
    allocated: AllocatedModel, static: StaticShapes | None = None, graphs: NativeGraphs | None = None
) -> DraftProposer | None:
    """Makes the proposer; None without speculative decoding. features.py refuses other methods.

    Args:
        allocated: the model, its draft model if the method has one, and the table of requests.
        static: the engine's static shapes with the draft model's graphs; None: steps run at true shapes.
        graphs: graphs of the draft model's steps at true shapes, on a CPU.
    """
    model, table = allocated.model, allocated.requests
    config = model.vllm_config.speculative_config
    if config is None:
        return None
    if model.draft_decoder is not None:
        longest = config.draft_model_config.max_model_len
        if static is not None:
            return _draft_model_at_static_shapes(allocated, static, longest)
        execution = TrueShapeExecution(
            model.draft_decoder,
            model.attention,
            allocated.block_size,
            model.tensors_on,
            graphs=graphs,
            carried=allocated.carried,
            groups=allocated.draft_groups,
        )
        groups = allocated.draft_groups.kv
        return DraftModelProposer(execution, table, groups, longest, ahead=allocated.drafts_ahead)
    assert config.prompt_lookup_min is not None
    assert config.prompt_lookup_max is not None
    num_drafts, lengths = config.num_speculative_tokens, (config.prompt_lookup_min, config.prompt_lookup_max)
    return NgramProposer(table, num_drafts, *lengths, host=allocated.host)


def _draft_model_at_static_shapes(
    allocated: AllocatedModel, static: StaticShapes, max_model_len: int
) -> DraftModelProposer:
    graphs = static.draft_model
    assert graphs is not None, "static shapes without the draft model"

    def divided() -> None:
        static.bypassed(f"pass of the draft model divided: {TOO_MANY_BLOCKS}")

    return DraftModelProposer(
        graphs.execution,
        allocated.requests,
        allocated.draft_groups.kv,
        max_model_len,
        likeliest=graphs.likeliest,
        divided=divided,
        host=allocated.host,
        ahead=allocated.drafts_ahead,
    )
