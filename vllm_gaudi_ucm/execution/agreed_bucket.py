"""What a bucket needs for the steps of all engines that share out experts, so that all run the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, least_prompt_tiles, phase_string
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES

if TYPE_CHECKING:
    from vllm_gaudi_ucm.distributed.lockstep import Lockstep

NO_STEP = Bucket(phase_string(False, False, False), 0, 0, 0, 0)
"""Of an engine without requests."""


def agreed_bucket(lockstep: Lockstep, needed: Bucket = NO_STEP) -> Bucket:
    """The least that holds the steps of all engines; without rows where none has any. Logits rows stay `needed`'s:
    their graph holds no experts. A collective on the host.

    Steps are within the limits of buckets in each dimension, so what holds them all is, too.
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
        causal_reach=tiles or ALL_TILES,
    )
