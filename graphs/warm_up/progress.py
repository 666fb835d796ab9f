"""How far a warm-up has come, as it is reported at the start and the end of every graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_gaudi_ucm.graphs.warm_up.graph_key import GraphKey
from vllm_gaudi_ucm.graphs.warm_up.summary import GraphRecord

Stage = Literal["skeleton", "rest"]


@dataclass(frozen=True)
class WarmUpProgress:
    """One report.

    stage: before serving starts at the earliest, or what comes after it.
    done, total: graphs of the stage that are settled (warm, dropped or failed), and all of it.
    current: the graph that starts now, or None where one has ended.
    ended: the record of the graph that has just ended or been dropped, or None where one starts.
    seconds: spent on graphs so far, the skeleton included.
    seconds_left: expected for the graphs of the stage that are left, from those before them; None without any.
    free_memory: bytes that are free on the device.
    """

    stage: Stage
    done: int
    total: int
    current: GraphKey | None
    ended: GraphRecord | None
    seconds: float
    seconds_left: float | None
    free_memory: int
