"""Other servers that `tune` and `plan` choose buckets for: each has a folder of its own, which may be missing."""

from __future__ import annotations

import argparse
import importlib
from importlib.util import find_spec

PACKAGE = "vllm_gaudi_ucm_tools"
SERVERS = {"vllm-gaudi": f"{PACKAGE}.vllm_gaudi"}
"""Names of servers and their folders. A folder has `options.add_arguments(parser, command)` and `command.RUN`."""

# Options of our own server by command. They mean nothing to another one.
OURS = {
    "tune": ("gap", "max_shared_blocks", "max_selected_blocks", "granularity", "contiguous"),
    "plan": (
        *("strategy", "strategy_options", "mix", "max_graphs", "skeleton", "count_nodes", "step_memory"),
        *("quantised_experts", "max_loras", "max_lora_rank", "picture_tokens", "sparse", "partial_loads"),
        *("max_shared_blocks", "max_selected_blocks", "granularity", "contiguous"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Declares --for with the installed servers, and their options; call it after all others are declared."""
    there = {name: module for name, module in SERVERS.items() if find_spec(module) is not None}
    parser.set_defaults(other_server=None, their_options=[], default_of=parser.get_default)
    if not there:
        return
    parser.add_argument(
        "--for", dest="other_server", choices=sorted(there), help="choose buckets for this server instead of our own"
    )
    theirs = []
    for module in there.values():
        theirs += importlib.import_module(f"{module}.options").add_arguments(parser, command)
    parser.set_defaults(their_options=theirs)


def run(args: argparse.Namespace, command: str) -> int | None:
    """Runs a command for the other server that was asked for; None if it is for our own.

    Raises:
        ValueError: an option does not belong to the server.
    """
    foreign = args.their_options if args.other_server is None else OURS[command]
    # some options belong to both
    shared = {"num_speculative_tokens"} if command == "plan" else set()
    for name in foreign:
        if name not in shared and getattr(args, name) != args.default_of(name):
            option = f"--{name.replace('_', '-')}"
            if args.other_server is None:
                raise ValueError(f"{option} needs --for {', '.join(SERVERS)}; leave it out for our own server")
            raise ValueError(f"{option} is an option of our own server, and cannot go with --for {args.other_server}")
    if args.other_server is None:
        return None
    module = importlib.import_module(f"{SERVERS[args.other_server]}.command")
    return int(module.RUN[command](args))
