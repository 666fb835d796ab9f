"""Options of `tune` and `plan` that are for vllm-gaudi alone, and the settings that they give."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings, read_assignments
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Request, TrafficError

LIMITS = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "block_size", "num_blocks")
BLOCK_SIZE = 128


def add_arguments(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """Declares the options, and returns the names of their values. command: which command has them."""
    group = parser.add_argument_group("with --for vllm-gaudi")
    actions = [
        group.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="an environment variable of the server, such as VLLM_BUCKETING_STRATEGY=pad; may be repeated",
        ),
        group.add_argument(
            "--no-prefix-caching",
            action="store_true",
            help="the server has --no-enable-prefix-caching, and then reads the cache contiguously unless "
            "VLLM_CONTIGUOUS_PA is set",
        ),
        group.add_argument(
            "--data-parallel-size", type=int, default=1, metavar="N", help="engines that step together (default: 1)"
        ),
        group.add_argument(
            "--hybrid-chunk",
            type=int,
            default=0,
            metavar="N",
            help="explicit chunk size of a hybrid model's state layers (default: no such layers)",
        ),
        group.add_argument(
            "--acceptance",
            type=float,
            default=0.6,
            metavar="SHARE",
            help="share of drafts that are accepted, when requests are simulated (default: %(default)s)",
        ),
        group.add_argument(
            "--most-requests",
            type=int,
            default=10_000,
            metavar="N",
            help="simulate no more than the first requests of a log (default: %(default)s)",
        ),
        group.add_argument(
            "--time-unit",
            choices=("s", "ms"),
            help="of the times in a log of requests (default: seconds; milliseconds for traces in Mooncake's form)",
        ),
        group.add_argument(
            "--drop-longer", action="store_true", help="leave out requests that are longer than the server takes"
        ),
    ]
    if command == "tune":
        actions += [
            group.add_argument(
                "--num-speculative-tokens", type=int, default=0, metavar="N", help="drafts of a request (default: 0)"
            ),
            group.add_argument(
                "--graph-memory",
                type=float,
                metavar="GIB",
                help="memory for graphs, modelled from a published figure; bounds their number as --max-graphs does",
            ),
            group.add_argument(
                "--picture", type=Path, metavar="FILE", help="also draw the traffic and the buckets (.png, .svg, .pdf)"
            ),
        ]
    return [action.dest for action in actions]


def settings_of(args: argparse.Namespace, known: Mapping[str, int]) -> Settings:
    """Returns the server's settings from options, and from what the log says.

    Raises:
        ValueError: a limit is in neither, or contradicts the log; or a setting is impossible.
    """
    values: dict[str, int | None] = {name: getattr(args, name) for name in LIMITS}
    if values["block_size"] is not None and known.get("block_size", values["block_size"]) != values["block_size"]:
        raise TrafficError(
            f"--block-size is {values['block_size']}, but the log says {known['block_size']}, and its steps count such "
            "blocks; leave the option out"
        )
    limits = {
        name: known.get(name, BLOCK_SIZE if name == "block_size" else 0) if v is None else v
        for name, v in values.items()
    }
    missing = [f"--{name.replace('_', '-')}" for name, value in limits.items() if not value and values[name] is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} are missing: the log does not name these limits of the server. vllm serve prints "
            "its arguments at start; --num-blocks is the size of the KV cache in tokens, which it prints, divided by "
            "the block size"
        )
    return Settings(
        **limits,
        drafts=args.num_speculative_tokens,
        ranks=args.data_parallel_size,
        hybrid_chunk=args.hybrid_chunk,
        prefix_caching=not args.no_prefix_caching,
        environment=read_assignments(args.set, "--set"),
    )


def drop_longer(requests: Sequence[Request], settings: Settings) -> tuple[Request, ...]:
    """Returns the requests that the server can take."""
    most = min(settings.max_model_len, (settings.num_blocks - 1) * settings.block_size - settings.drafts)
    return tuple(request for request in requests if request.prompt + request.output <= most)
