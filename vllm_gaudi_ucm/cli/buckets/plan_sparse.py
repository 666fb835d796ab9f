"""What a sparse method adds to a plan: the blocks that it can select, and graphs for tails of prompts."""

from __future__ import annotations

import argparse
from dataclasses import replace

from vllm_gaudi_ucm.cli.doctor.configuration import resolve_text
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import TailShapes, tail_rows


def add_sparse_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --sparse and --partial-loads."""
    group = parser.add_argument_group("sparse method of the server")
    group.add_argument(
        "--sparse",
        metavar="FILE|JSON",
        help="what you pass as ucm in --additional-config; its method and options say how many blocks are selected",
    )
    group.add_argument(
        "--partial-loads",
        action="store_true",
        help="prompts may be loaded in part, by UcmConnector under memory mode: count the graphs for their tails",
    )


def with_sparse_method(args: argparse.Namespace, limits: Limits) -> tuple[Limits, TailShapes | None]:
    """The limits with the blocks that --sparse selects, and the shapes for tails where --partial-loads asks for them.

    As a server at static shapes and without drafts has them.

    Raises:
        ValueError: options that do not go together, or a configuration without what they need.
    """
    if args.sparse is None:
        if args.partial_loads:
            raise ValueError("--partial-loads needs --sparse: what is selected decides how large the graphs are")
        return limits, None
    if args.max_selected_blocks is not None:
        raise ValueError("--max-selected-blocks and --sparse both say how many blocks are selected; leave one out")
    # torch and vLLM take seconds, which a plan without a sparse method need not
    from vllm_gaudi_ucm.config.ucm_config import block_options
    from vllm_gaudi_ucm.execution.bucketed_execution import tail_shapes
    from vllm_gaudi_ucm.sparse.selection.sparse_worker import ServerSizes, selection_limits

    config = resolve_text(args.sparse)
    options = block_options(config)
    if options is None:
        raise ValueError(
            f"--sparse: ucm_sparse_method is {config.ucm_sparse_method!r}, expected one that selects blocks"
        )
    if args.partial_loads and not config.memory_mode.enabled:
        raise ValueError(
            "--partial-loads: memory_mode.enabled of --sparse is false, and then nothing is loaded in part"
        )
    sizes = ServerSizes(limits.max_model_len, limits.max_num_seqs, 1, limits.block_size, limits.num_blocks, static=True)
    if args.partial_loads:
        sizes = sizes._replace(tail_rows=tail_rows(limits.block_size, limits.max_num_batched_tokens, sizes.max_rows))
    choices = selection_limits(options, sizes)
    limits = replace(limits, max_selected_blocks=choices.max_selected_blocks)
    return limits, tail_shapes(limits, choices)
