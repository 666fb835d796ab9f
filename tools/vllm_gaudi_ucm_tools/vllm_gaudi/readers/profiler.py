"""Reads the JSON of vllm-gaudi's profiler (`VLLM_PROFILER_ENABLED=true`, files `server_events_*.json`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_gaudi_ucm_tools.vllm_gaudi.readers.numbers import whole
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Prefill, Step, Traffic, TrafficError

CONSTANTS = {"const_cache_num_blocks": "num_blocks", "const_block_size": "block_size"}


def events(text: str, source: str) -> Iterator[Mapping[str, Any]]:
    """Yields the objects of an array that the profiler never closes; the last one may be cut."""
    decoder, place = json.JSONDecoder(), text.index("[") + 1
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        if place >= len(text) or text[place] == "]":
            return
        try:
            event, place = decoder.raw_decode(text, place)
        except ValueError as error:
            if "}" not in text[place:]:
                return
            raise TrafficError(f"{source}: malformed JSON at character {place}") from error
        if not isinstance(event, dict):
            raise TrafficError(f"{source}: holds {type(event).__name__} in its array, expected events of a profiler")
        yield event


def counters(text: str, source: str) -> list[Mapping[str, Any]]:
    """Returns the counters of steps."""
    found = [event.get("args") for event in events(text, source) if event.get("ph") == "C"]
    return [args for args in found if isinstance(args, dict)]


def known_limits(found: list[Mapping[str, Any]]) -> dict[str, int]:
    """Returns what the log says of the server's limits."""
    known: dict[str, int] = {}
    for args in found:
        for name, limit in CONSTANTS.items():
            if args.get(name) is not None:
                known[limit] = whole(args[name], name, 1)
    return known


def traffic(text: str, source: str, settings: Settings) -> Traffic:
    """Returns the steps of a log: a step for each prefill batch and each decode.

    Raises:
        TrafficError: it has no counters of steps, or settings that it cannot tell the steps of.
    """
    if settings.drafts or settings.ranks > 1:
        raise TrafficError(
            f"{source}: a profiler's log says neither which steps had drafts nor what other ranks computed; leave "
            "--num-speculative-tokens and --data-parallel-size out, or give a log of requests"
        )
    steps, assumptions = [], ["prompts of a batch are as long as its longest one"]
    for number, args in enumerate(counters(text, source), 1):
        if "prompt_batch_size" in args:
            steps.append((_prefills(args, f"{source}: counter {number}"),))
        elif "decode_batch_size" in args:
            steps.append((_decodes(args, settings, f"{source}: counter {number}"),))
    if not steps:
        raise TrafficError(
            f"{source}: has no counters of prompts or decodes; expected a file that vllm-gaudi wrote with "
            "VLLM_PROFILER_ENABLED=true while it served"
        )
    if settings.contiguous:
        assumptions.append("the highest block of a step is the one of the bucket that it ran in, an upper bound")
    return Traffic(f"{source} (profiler of vllm-gaudi)", steps, tuple(assumptions))


def _prefills(args: Mapping[str, Any], place: str) -> Step:
    count = whole(args["prompt_batch_size"], f"{place}, prompt_batch_size", 1)
    query = whole(args.get("prompt_seq_len"), f"{place}, prompt_seq_len", 1)
    computed = whole(args.get("prompt_ctx_len", 0), f"{place}, prompt_ctx_len")
    return Step((Prefill(query, computed),) * count, 0, 0)


def _decodes(args: Mapping[str, Any], settings: Settings, place: str) -> Step:
    count = whole(args["decode_batch_size"], f"{place}, decode_batch_size", 1)
    blocks = whole(args.get("cache_num_blocks_used"), f"{place}, cache_num_blocks_used", 1)
    highest = 0
    if settings.contiguous:
        highest = whole(args.get("decode_bucket_ctx_blocks"), f"{place}, decode_bucket_ctx_blocks", 1)
    return Step((), count, max(blocks, count), min(highest, settings.num_blocks))
