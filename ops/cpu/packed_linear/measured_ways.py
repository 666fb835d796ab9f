"""Measures the fastest way to multiply each number of rows: some milliseconds for each kind of weight, kept on disk.

Every process of this user on this machine reads the same file, so all ranks of an engine choose alike. Without a folder
for the file, nothing is measured and the rule in `way.py` decides. While other programs keep the machine busy, times
say nothing about the products: then the rule decides too, and a later start measures again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from vllm_gaudi_ucm.envs import user_cache
from vllm_gaudi_ucm.ops.cpu.native import matrix_unit
from vllm_gaudi_ucm.ops.cpu.native.build import alone
from vllm_gaudi_ucm.ops.cpu.native.library import identity, native
from vllm_gaudi_ucm.ops.cpu.packed_linear.api import (
    PACK_FOR_ROWS,
    PackedWeight,
    multiply_form,
    multiply_pairs,
)
from vllm_gaudi_ucm.ops.cpu.packed_linear.packing import GROUP, Compact, Form, find_panels, pairs_of, panels_of
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import MEASURED_ROWS, Kind, Times, Way, set_times
from vllm_gaudi_ucm.private_folder import make_private_folder, refuse_foreign

logger = logging.getLogger(__name__)

# A weight of a small model: large enough that a product of one row is work for several threads.
OUTPUTS, INPUTS = 768, 576
# A time counts when it has come this often, within this factor. A quiet machine needs no other repeats; a busy one is
# given up after so many seconds for each number of rows.
SEEN, WITHIN = 3, 1.15
LONGEST = 0.3
# 128 rows are 128 times the work of one: at least so many times as long, even if reading the weight is what takes time.
LEAST_GROWTH = 1.5
# Seconds until a start measures again what was disturbed. Ranks of an engine start within less, and choose alike.
MEASURED_AGAIN_AFTER = 600

Seconds = dict[Way, tuple[float, ...]]
Product = Callable[[Tensor], Tensor]


def learn_ways(kinds: Collection[Kind], folder: Path | None = None) -> None:
    """Loads the times of these kinds into this process from disk, or measures them. folder: replaces the user's.

    The first process of several measures; the others wait for it. Times that cannot be kept are not measured, because
    another rank might get different ones.
    """
    if native() is None or not kinds:
        return
    try:
        folder = folder or user_cache() / "native"
        make_private_folder(folder)
        path = folder / f"product-times-{_key()}.json"
        known = _read(path)
        if _missing(kinds, known, path):
            with alone(folder):
                known = _read(path)
                if missing := _missing(kinds, known, path):
                    known |= {kind: measure(kind) for kind in missing}
                    _write(path, known)
    except (OSError, RuntimeError) as error:
        logger.info("Products are not measured, because their times cannot be saved: %s", error)
        return
    set_times(known)


def _missing(kinds: Collection[Kind], known: Mapping[Kind, Seconds], path: Path) -> list[Kind]:
    """Returns the kinds to measure: the file lacks them, or their measurement was disturbed some time ago."""
    old = path.exists() and time.time() - path.stat().st_mtime > MEASURED_AGAIN_AFTER
    return [kind for kind in kinds if kind not in known or (old and not known[kind])]


def known_ways(folder: Path | None = None) -> dict[Kind, Times]:
    """Returns the times saved for this machine, without measuring; empty if none were measured yet."""
    if native() is None:
        return {}
    try:
        folder = folder or user_cache() / "native"
        known = _read(folder / f"product-times-{_key()}.json")
    except (OSError, RuntimeError):
        return {}
    return {kind: Times(kind, seconds) for kind, seconds in known.items()}


def _key() -> str:
    """Returns a key of CPU, compiler and source of the kernels, torch, and its threads."""
    return f"{identity()}-torch{torch.__version__}-{torch.get_num_threads()}"


def measure(kind: Kind) -> Seconds:
    """Times a kind's products in each way that this machine has, interleaved: seconds, the least of several repeats.

    Returns an empty mapping if other programs disturbed the measurement.
    """
    products = _products(kind)
    x = torch.ones(MEASURED_ROWS[-1], INPUTS, dtype=torch.bfloat16 if kind is Kind.PAIRS else torch.float32)
    found: dict[Way, list[float]] = {way: [] for way in products}
    for rows in MEASURED_ROWS:
        least = _least_times({way: partial(product, x[:rows]) for way, product in products.items()})
        if least is None:
            logger.info("Products are not measured while other programs use the cores (%s): a rule decides", kind)
            return {}
        for way, seconds in least.items():
            found[way].append(seconds)
    if any(times[-1] < LEAST_GROWTH * times[0] for times in found.values()):
        logger.info(
            "Measured products of 1 and %d rows took equally long (%s): a rule decides", MEASURED_ROWS[-1], kind
        )
        return {}
    return {way: tuple(seconds) for way, seconds in found.items()}


def _least_times(calls: Mapping[Way, Callable[[], object]]) -> dict[Way, float] | None:
    """Returns the least seconds of each call, once each has come often enough; None if that takes too long."""
    times: dict[Way, list[float]] = {way: [] for way in calls}
    for call in calls.values():
        # fills the caches, and lets oneDNN compile
        call()
    deadline = time.perf_counter() + LONGEST
    while not all(_settled(seconds) for seconds in times.values()):
        if time.perf_counter() > deadline:
            return None
        for way, call in calls.items():
            begin = time.perf_counter()
            call()
            times[way].append(time.perf_counter() - begin)
    return {way: min(seconds) for way, seconds in times.items()}


def _settled(seconds: list[float]) -> bool:
    return len(seconds) >= SEEN and sorted(seconds)[SEEN - 1] <= WITHIN * min(seconds)


def _products(kind: Kind) -> dict[Way, Product]:
    dtype = torch.bfloat16 if kind is Kind.PAIRS else torch.float32
    plain = torch.arange(OUTPUTS * INPUTS, dtype=torch.float32).remainder_(251).to(dtype).view(OUTPUTS, INPUTS)
    packed = torch.ops.mkldnn._reorder_linear_weight(plain, PACK_FOR_ROWS)
    found: dict[Way, Product] = {}
    if kind is Kind.PAIRS:
        pairs = pairs_of(plain)
        assert pairs is not None, "the sizes divide evenly"
        found[Way.VECTORS] = lambda x: multiply_pairs(x, pairs, None, tiles=False)
        if matrix_unit.available():
            found[Way.TILES] = lambda x: multiply_pairs(x, pairs, None, tiles=True)
    else:
        form = find_panels(plain, packed) or panels_of(plain) if kind is Kind.FLOAT32 else _compact(Form[kind.name])
        if form is not None:
            found[Way.VECTORS] = lambda x: multiply_form(x, form, OUTPUTS, None, tiles=False)
            if matrix_unit.available() and kind is not Kind.FLOAT16:
                found[Way.TILES] = lambda x: multiply_form(x, form, OUTPUTS, None, tiles=True)
    found[Way.ONEDNN] = lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    found[Way.PLAIN] = lambda x: linear(x, plain)
    return found


def _compact(form: Form) -> Compact:
    """A weight of zeros: how long it takes does not depend on the values."""
    width, panels = 64, OUTPUTS // 64
    bits16 = form in (Form.BFLOAT16, Form.FLOAT16)
    inputs = INPUTS // 2 if form is Form.AFFINE4 else INPUTS
    dtype = torch.int16 if bits16 else torch.uint8 if form is Form.AFFINE4 else torch.int8
    groups = torch.zeros(panels, INPUTS // GROUP, width)
    none = torch.zeros(0)
    offsets = groups if form is Form.AFFINE4 else none
    return Compact(form, torch.zeros(panels, inputs, width, dtype=dtype), none if bits16 else groups, offsets, width)


def _read(path: Path) -> dict[Kind, Seconds]:
    """Returns the contents of a file; empty if it is missing, damaged, or open to others: it is then rewritten."""
    try:
        refuse_foreign(path)
        content = json.loads(path.read_text())
        return {Kind(kind): _checked(seconds) for kind, seconds in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _checked(seconds: Mapping[str, Any]) -> Seconds:
    """Checks times from a file; empty ones were disturbed.

    Raises ValueError or TypeError unless they have the form that `measure` returns.
    """
    found = {Way(way): tuple(float(one) for one in times) for way, times in seconds.items()}
    if found and (missing := {Way.ONEDNN, Way.PLAIN} - found.keys()):
        raise ValueError(f"the times of {', '.join(sorted(missing))} are missing")
    for times in found.values():
        if len(times) != len(MEASURED_ROWS) or not all(math.isfinite(one) and one > 0 for one in times):
            raise ValueError(f"found {times}, expected {len(MEASURED_ROWS)} positive times")
    return found


def _write(path: Path, times: Mapping[Kind, Seconds]) -> None:
    """Writes a file atomically: another process reads all of it or none."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".product-times-")
    with os.fdopen(descriptor, "w") as file:
        json.dump(times, file)
    os.replace(name, path)


def kinds_of(weights: Collection[PackedWeight]) -> set[Kind]:
    """Returns the kinds in which these weights are kept."""
    found = set()
    for weight in weights:
        if weight.pairs is not None:
            found.add(Kind.PAIRS)
        elif weight.compact is not None:
            found.add(Kind[weight.compact.form.name])
        elif weight.panels is not None:
            found.add(Kind.FLOAT32)
    return found
