"""Counts steps for /metrics while the worker serves."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vllm_gaudi_ucm.envs import multi_process_metrics
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, phase_string
from vllm_gaudi_ucm.graphs.shapes.prompt_remainder import RemainderShape
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm.graphs.warm_up.records import GraphKey
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability import metric
from vllm_gaudi_ucm.observability.metrics_file import (
    MetricsFile,
    Series,
    hold_private,
    metrics_folder,
    remove_files,
    remove_stale,
)
from vllm_gaudi_ucm.observability.room_metrics import (
    NativeGraphMetrics,
)

DIMENSIONS = ("query", "shared", "unique", "logits", "selected")
STAGES = ("plan", "forward", "sample")
PARTS = (False, True)

logger = plugin_logger(__name__)


class StepMetrics:
    """Counts steps, padding, bucket hits, recipes, bypasses and warm-up of one engine.

    A step costs some ten stores to mapped memory (2 us). Not thread-safe: the worker's thread calls it.

    Args:
        folder: where the API server looks for the figures; None: they are counted but not exported.
        engine: the data-parallel rank, the value of the label `engine`.
        is_shared: `folder` is prometheus_client's, with files of others that are named after process ids.
        lock: descriptor that holds `folder`; `close` closes it.
    """

    def __init__(self, folder: Path | None, engine: int = 0, is_shared: bool = False, lock: int | None = None) -> None:
        self._own_folder = None if is_shared else folder
        self._lock = lock
        self._writer = f"ucm{engine}" if is_shared else str(engine)
        self.file = file = MetricsFile(folder, engine, self._writer)
        # Series start at 0 if their labels are known: a rate needs the value before the first event.
        phases = [phase_string(c, s, u) for c in PARTS for s in PARTS for u in PARTS]
        self._steps = {phase: file.series(metric.STEPS, phase) for phase in phases}
        self._sizes = [
            file.series(size, name) for size in (metric.TRUE_SIZE, metric.PADDED_SIZE) for name in DIMENSIONS
        ]
        self._seconds = [file.series(metric.STEP_SECONDS, stage) for stage in STAGES]
        self._recipes = file.series(metric.RECIPES)
        self._waits = [file.series(waits) for waits in (metric.WAITS, metric.WAIT_SECONDS)]
        self._graphs: dict[GraphKey, Series] = {}
        self._native_graphs: NativeGraphMetrics | None = None
        self._later: dict[tuple[str, ...], Series] = {}

    def native_graphs(self) -> NativeGraphMetrics:
        """The series of graphs of native calls, of all models; only a CPU at true shapes shows them."""
        if self._native_graphs is None:
            self._native_graphs = NativeGraphMetrics(self.file)
        return self._native_graphs

    @classmethod
    def of_engine(cls, instance_id: str, engine: int) -> StepMetrics:
        """Metrics that reach the stat logger of the engine's API server; an engine serves without them if it must."""
        shared = multi_process_metrics()
        try:
            if shared is not None:
                return cls(shared, engine, is_shared=True)
            remove_stale()
            folder = metrics_folder(instance_id)
            return cls(folder, engine, lock=hold_private(folder))
        except OSError as error:
            logger.warning("No gaudi_ucm metrics on /metrics: %s", error)
            return cls(None, engine)

    def step(self, true: Bucket, padded: Bucket, prompt_remainder: bool = False) -> None:
        """One step of shape `true` that ran at `padded`: a bucket, or `true` itself (the same object) without one.

        prompt_remainder: its forward graph was one for remainders.
        """
        self._steps[true.phase].add(1)
        for series, size in zip(self._sizes, true[1:6] + padded[1:6], strict=True):
            series.add(size)
        # Identity, not equality: a step may fill its bucket exactly, and true shapes have no bound on their number.
        if padded is not true:
            self._graph(RemainderShape(padded.forward) if prompt_remainder else padded.forward).add(1)
            self._graph(padded.logits).add(1)

    def times(self, plan_ms: float, forward_ms: float, sample_ms: float) -> None:
        plan, forward, sample = self._seconds
        plan.add(plan_ms * 1e-3)
        forward.add(forward_ms * 1e-3)
        sample.add(sample_ms * 1e-3)

    def chosen_tokens(self, rows: int) -> None:
        """One step that chose tokens for its rows (DSA). rows: rows that saw more tokens than they chose."""
        self._labelled(metric.CHOSEN_STEPS).add(1)
        self._labelled(metric.CHOSEN_ROWS).add(rows)

    def bypass(self, reason: str) -> None:
        """One execution outside the captured graphs; `reason` is a label, so it names no request."""
        self._labelled(metric.BYPASSES, reason).add(1)

    def host_read(self, reason: str) -> None:
        """One read of the device that a step waited for."""
        self._labelled(metric.HOST_READS, reason).add(1)

    def host_stage(self, stage: str) -> None:
        """One stage of a step that ran on the host."""
        self._labelled(metric.HOST_STAGES, stage).add(1)

    def recipe(self) -> None:
        """One recipe compiled after warm-up."""
        self._recipes.add(1)

    def warm_up(self, done: int, total: int, seconds: float, skeleton_seconds: float | None) -> None:
        """Sets the progress: warm buckets of all, seconds so far, and until the skeleton was warm (None: not yet)."""
        self._labelled(metric.WARM_UP_BUCKETS, "done").set(done)
        self._labelled(metric.WARM_UP_BUCKETS, "total").set(total)
        self._labelled(metric.WARM_UP_SECONDS).set(seconds)
        if skeleton_seconds is not None:
            self._labelled(metric.SKELETON_SECONDS).set(skeleton_seconds)

    def waits(self, count: int, seconds: float) -> None:
        """Steps that have waited for a graph that was being warmed, and for how long: totals since the start."""
        waits, waited_seconds = self._waits
        waits.set(count)
        waited_seconds.set(seconds)

    def close(self) -> None:
        """Remove the files, so that the metrics leave /metrics; later counts go nowhere. Safe to call twice.

        Files in a shared folder stay: a reader that has just listed them would fail on a missing one.
        """
        if self._own_folder is not None:
            remove_files(self._own_folder, self._writer)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _graph(self, graph: GraphKey) -> Series:
        """Counts a graph, not a bucket: forward and logits graphs combine freely, so there are fewer of them."""
        series = self._graphs.get(graph)
        if series is None:
            series = self._graphs[graph] = self.file.series(metric.BUCKET_STEPS, *_graph_labels(graph))
        return series

    def _labelled(self, kind: metric.Metric, *labels: str) -> Series:
        """A series that exists from its first value on: an engine without warm-up shows no progress of it."""
        key = (kind.name, *labels)
        if key not in self._later:
            self._later[key] = self.file.series(kind, *labels)
        return self._later[key]


def _graph_labels(graph: GraphKey) -> tuple[str, str]:
    """Its kind, and its sizes."""
    if isinstance(graph, RemainderShape):
        return "prompt_remainder", forward_label(graph.forward)
    return ("forward", forward_label(graph)) if isinstance(graph, ForwardShape) else ("logits", f"l{graph}")


def forward_label(shape: ForwardShape) -> str:
    """`csu q512 s8 u64`: phase, rows, shared blocks, unique blocks; ` x16`: selected blocks, ` r2`: prompt tiles."""
    phase, query_len, shared_blocks, unique_blocks, selected_blocks, max_prompt_tiles = shape
    selected = f" x{selected_blocks}" if selected_blocks else ""
    tiles = f" r{max_prompt_tiles}" if max_prompt_tiles != ALL_TILES else ""
    return f"{phase} q{query_len} s{shared_blocks} u{unique_blocks}{selected}{tiles}"


class BucketColumns(NamedTuple):
    """names: of the columns, as `ForwardShape` calls them."""

    names: tuple[str, ...]

    @classmethod
    def from_shapes(cls, shapes: Iterable[ForwardShape], selected: bool | None = None) -> BucketColumns:
        """selected: whether there is a sparse method; None: whether any shape has selected blocks."""
        listed = list(shapes)
        names = ["query_len", "shared_blocks", "unique_blocks"]
        if selected or (selected is None and any(shape.selected_blocks for shape in listed)):
            names.append("selected_blocks")
        if any(shape.max_prompt_tiles != ALL_TILES for shape in listed):
            names.append("max_prompt_tiles")
        return cls(tuple(names))

    @property
    def headings(self) -> list[str]:
        """One short word for each column."""
        return [name.removesuffix("_blocks").removesuffix("_len").removeprefix("max_prompt_") for name in self.names]

    def cells(self, shape: ForwardShape) -> list[str]:
        """The sizes of one shape; unbounded prompt tiles are left empty."""
        sizes = (getattr(shape, name) for name in self.names)
        return ["" if size == ALL_TILES else f"{size:,}" for size in sizes]
