"""Reads a description of traffic: how many requests, how fast, and how long."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from vllm_gaudi_ucm_tools.traffic.simulation import Lengths
from vllm_gaudi_ucm_tools.vllm_gaudi.readers.numbers import seconds, whole
from vllm_gaudi_ucm_tools.vllm_gaudi.traffic import Request, TrafficError

KEYS = ("requests", "rate", "prompt", "output", "prefix", "seed")
PREFIX_KEYS = ("tokens", "share", "kinds")
# Parts of a prefix that requests share.
UNIT = 16
MOST_REQUESTS = 1_000_000


def is_description(value: Any) -> bool:
    return isinstance(value, dict) and "prompt" in value and "output" in value and "requests" in value


def from_description(value: Mapping[str, Any], source: str) -> list[Request]:
    """Returns requests that arrive independently of each other at a mean rate; the same seed gives the same ones.

    Raises:
        TrafficError: an unknown key, or a value that is no number of its kind.
    """
    _check_keys(value, KEYS, source)
    count = whole(value["requests"], f"{source}: requests", 1)
    if count > MOST_REQUESTS:
        raise TrafficError(f"{source}: requests is {count}, expected at most {MOST_REQUESTS}")
    rate = seconds(value.get("rate", 0.0), f"{source}: rate")
    if rate < 0:
        raise TrafficError(f"{source}: rate is {rate:g}, expected requests per second, or 0 for all at once")
    prompt, output = (_lengths(value[name], f"{source}: {name}") for name in ("prompt", "output"))
    prefix = value.get("prefix", {"tokens": 0, "share": 0.0})
    _check_keys(prefix, PREFIX_KEYS, f"{source}: prefix")
    tokens = whole(prefix.get("tokens"), f"{source}: prefix.tokens")
    share = seconds(prefix.get("share", 1.0), f"{source}: prefix.share")
    kinds = whole(prefix.get("kinds", 1), f"{source}: prefix.kinds", 1)
    rng = random.Random(whole(value.get("seed", 0), f"{source}: seed"))
    clock, found = 0.0, []
    for _ in range(count):
        clock += rng.expovariate(rate) if rate else 0.0
        own, answer = prompt.draw(rng), output.draw(rng)
        if tokens and rng.random() < share:
            kind = rng.randrange(kinds)
            hashes = tuple(kind * (tokens // UNIT + 1) + part for part in range(tokens // UNIT))
            found.append(Request(clock, tokens + own, answer, hashes, UNIT))
        else:
            found.append(Request(clock, own, answer))
    return found


def _lengths(value: Any, place: str) -> Lengths:
    """Returns log-normal lengths, or one length if the value is a number."""
    if not isinstance(value, dict):
        length = whole(value, place, 1)
        return Lengths(length, 0.0, length, length)
    _check_keys(value, Lengths._fields, place)
    median = whole(value.get("median"), f"{place}.median", 1)
    sigma = seconds(value.get("sigma", 0.0), f"{place}.sigma")
    low, high = whole(value.get("low", 1), f"{place}.low", 1), whole(value.get("high", 1 << 30), f"{place}.high", 1)
    if low > high or not 0.0 <= sigma <= 10.0:
        raise TrafficError(f"{place}: low {low}, high {high}, sigma {sigma:g}; expected low <= high, sigma 0 to 10")
    return Lengths(median, sigma, low, high)


def _check_keys(value: Any, known: tuple[str, ...], place: str) -> None:
    if not isinstance(value, dict):
        raise TrafficError(f"{place}: is {type(value).__name__}, expected an object with {', '.join(known)}")
    if unknown := [str(key) for key in value if key not in known]:
        raise TrafficError(f"{place}: has {', '.join(unknown)}, expected only {', '.join(known)}")
