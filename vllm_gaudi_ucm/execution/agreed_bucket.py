"""Finds the bucket for the steps of all engines that share out experts, so that all run the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, least_prompt_tiles, phase_string
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES

if TYPE_CHECKING:
    from vllm_gaudi_ucm.distributed.lockstep import Lockstep

NO_STEP = Bucket(phase_string(False, False, False), 0, 0, 0, 0)
"""The bucket of an engine without requests."""


def agreed_bucket(lockstep: Lockstep, needed: Bucket = NO_STEP) -> Bucket:
    """Returns the smallest sizes that hold the steps of all engines; without rows if no engine has any. Logits rows are
    those of `needed`, because the logits graph holds no experts. A collective on the host.

    Steps are within the limits of buckets in each dimension, and so is the returned bucket.
    """
    own = [int(part != "-") for part in needed.phase]
    sizes = needed.query_len, needed.shared_blocks, needed.unique_blocks, needed.selected_blocks
    *parts, query_len, shared, unique, selected, tiles = lockstep.agree([*own, *sizes, least_prompt_tiles(needed)])
    phase = phase_string(*map(bool, parts))
    return Bucket(
        phase,
        query_len,
        shared,
        unique,
        logits=needed.logits,
        selected_blocks=selected,
        max_prompt_tiles=tiles or ALL_TILES,
    )
