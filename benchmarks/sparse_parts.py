"""Breaks down the time of a layer with chosen blocks on a GPU: scores, choice, hand-over and attention, each as a
graph.

The choice is timed by `cuda` and by `cuda_fused`, which ranks and hands over in one launch and has to choose the same
blocks. A graph holds the part for several layers, whose blocks do not fit the GPU's cache together; figures are medians
of its replays, for one layer. `--sweep` repeats attention and scores with other numbers of programs and other tiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import sparse_attention_workload as workloads
from benchmarks.sparse_device import MODEL, copy_bandwidth, milliseconds
from benchmarks.sparse_engine import SUMMARY_DTYPES
from vllm_gaudi_ucm.ops.block_selection.api import (
    block_scores,
    choose_blocks,
    prepare_spans,
    rank_and_take,
    take_choice,
)
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.ops.block_selection.impl.cuda import fused as cuda_fused
from vllm_gaudi_ucm.ops.block_selection.impl.cuda import selection as cuda
from vllm_gaudi_ucm.ops.block_selection.impl.reference import REUSE
from vllm_gaudi_ucm.ops.block_selection.implementation import ChoosingSpans
from vllm_gaudi_ucm.ops.narrow_floats import narrow
from vllm_gaudi_ucm.ops.unified_attention.impl.cuda import plan as cuda_plan

LAYERS, FUSED = 4, "cuda_fused"
SIZES = ((8, 32768, 0.1), (8, 32768, 0.3), (1, 131072, 0.1), (1, 131072, 0.3))
BLOCK_BYTES = workloads.BLOCK_SIZE * MODEL.kv_heads * 2 * MODEL.dim * 2
Part = Callable[[int], Any]


class Layers:
    """Requests of a size, and the parts of each of their layers."""

    def __init__(self, requests: int, context: int, kind: SummaryKind, narrow_summaries: bool = False) -> None:
        blocks = requests * context // workloads.BLOCK_SIZE
        workloads.KIND = kind
        workloads.POOL_BYTES = 4 * LAYERS * (blocks + 1) * workloads.BLOCK_SIZE * MODEL.kv_heads * 2 * MODEL.dim
        self.load = workloads.Workload(MODEL, requests, context, one_call=False)
        if narrow_summaries:
            self.load.summaries = narrow(self.load.summaries)
        self.kind, self.context = kind, context
        self.new = self.load._tokens(1)
        candidates = self.load.tables[:, 1:-1].contiguous()
        self.width, self.spans = candidates.shape[1], self.load.spans
        self.blocks, self.places = candidates.flatten(), torch.arange(requests * self.width)
        self.owners, self.ones = self.spans.repeat_interleave(self.width), torch.ones_like(self.spans)
        self.table = torch.cat((self.blocks, self.blocks[:1] * 0))

    def parts(self, ratio: float) -> dict[str, Part]:
        load, chosen = self.load, self.load._chosen(ratio)
        count = chosen * self.ones
        ready = prepare_spans(self.owners, self.spans, self.ones, 1, count, 0 * count, chosen, implementation="cuda")
        stored, checks = torch.zeros(load.requests + 1, chosen, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        kept = [self._scores(layer, ready) for layer in range(LAYERS)]
        rankings = [self._rank(scores, chosen, ready) for scores in kept]
        of_spans = self.spans, count, 0 * count, 0 * count

        def take(layer: int) -> Tensor:
            total = chosen * load.requests
            choosing = ChoosingSpans(stored, *of_spans, self.width, self.table, total, checks)
            return take_choice(rankings[layer], choosing, implementation="cuda")[1]

        fused_ready = prepare_spans(
            self.owners, self.spans, self.ones, 1, count, 0 * count, chosen, implementation=FUSED
        )

        def rank_and_hand_over(layer: int) -> Tensor:
            total = chosen * load.requests
            rest = self.width, self.table, total, checks
            choosing = ChoosingSpans(stored, *of_spans, *rest)
            return rank_and_take(kept[layer], self.places, choosing, implementation=FUSED, prepared=fused_ready)[1]

        nobody = 0 * self.ones
        reused = prepare_spans(self.owners, self.spans, nobody, 1, count, nobody + REUSE, chosen, implementation=FUSED)

        def reuse(layer: int) -> Tensor:
            """Times a step in which every request reuses its choice: no summary is read, and the stored choice is
            handed over.
            """
            scores = self._scores(layer, reused, FUSED, nobody)
            of = self.spans, count, nobody + REUSE, nobody
            rest = self.width, self.table, chosen * load.requests, checks
            choosing = ChoosingSpans(stored, *of, *rest)
            return rank_and_take(scores, self.places, choosing, implementation=FUSED, prepared=reused)[1]

        ids = [take(layer).clone() for layer in range(LAYERS)]
        for layer in range(LAYERS):
            if not torch.equal(ids[layer], rank_and_hand_over(layer)):
                raise SystemExit(f"benchmarks.sparse_parts: {FUSED} chooses other blocks by the same scores")
            scores = self._scores(layer, fused_ready, FUSED)
            torch.testing.assert_close(scores, kept[layer], atol=1e-5, rtol=1e-3)
        unique, selected = load._unique(load.tables[:, [0, -1]]), load._selected(chosen, 1)
        attend = load._attention(workloads.AttentionParts(unique=unique, selected=selected))
        return {
            "scores": lambda layer: self._scores(layer, ready),
            "scores, fused": lambda layer: self._scores(layer, fused_ready, FUSED),
            "ranking and hand-over, fused": rank_and_hand_over,
            "all of it, reused": reuse,
            "ranking": lambda layer: self._rank(kept[layer], chosen, ready),
            "hand-over": take,
            "attention": lambda layer: attend(layer, self.new, ids[layer]),
        }

    def dense(self) -> Part:
        run = self.load.dense().run
        return lambda layer: run(layer, self.new)

    def _scores(self, layer: int, ready: Any, name: str = "cuda", num_rows: Tensor | None = None) -> Tensor:
        num_rows = self.ones if num_rows is None else num_rows
        rows = self.blocks, self.owners, self.spans, num_rows, 1, MODEL.dim**-0.5
        summaries = self.load.summaries[layer]
        return block_scores(self.new.query, summaries, *rows, self.kind, implementation=name, prepared=ready)

    def _rank(self, scores: Tensor, chosen: int, ready: Any) -> Tensor:
        return choose_blocks(
            scores, self.places, len(self.spans), self.width, chosen, implementation="cuda", prepared=ready
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--summary", choices=[kind.value for kind in SummaryKind], default="box_mean")
    parser.add_argument("--summary-dtype", choices=SUMMARY_DTYPES, default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("found no CUDA device")
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    bandwidth, kind = copy_bandwidth(), SummaryKind(options.summary)
    name, summary = torch.cuda.get_device_name(), f"{kind.value} ({options.summary_dtype})"
    print(f"{name}, {bandwidth / 1e12:.2f} TB/s, summary {summary}; microseconds of a layer")
    rows: list[dict[str, Any]] = []
    layers, before = None, None
    for requests, context, ratio in SIZES:
        if before != (requests, context):
            layers, before = None, (requests, context)
            torch.cuda.empty_cache()
            layers = Layers(requests, context, kind, options.summary_dtype == "fp8")
            dense = timed(layers.dense(), options.repeats)
        assert layers is not None
        row = {name: timed(part, options.repeats) for name, part in layers.parts(ratio).items()}
        attended = (layers.load._chosen(ratio) + workloads.LIVE) * requests * BLOCK_BYTES
        read = layers.blocks.shape[0] * layers.load.summaries[0, 0].nbytes
        shown = "  ".join(f"{name} {spent:6.1f}" for name, spent in row.items())
        print(
            f"{requests}x{context} {ratio:.0%}: dense {dense:6.1f}  {shown}  | bytes alone: "
            f"attention {attended / bandwidth * 1e6:.1f}, scores {read / bandwidth * 1e6:.1f}",
            flush=True,
        )
        rows.append({"requests": requests, "context": context, "ratio": ratio, "dense": dense, **row})
        if options.sweep:
            rows[-1]["sweep"] = sweep(layers, ratio, options.repeats)
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=2) + "\n")


def sweep(layers: Layers, ratio: float, repeats: int) -> dict[str, float]:
    """Microseconds by setting, the fastest first."""
    found: dict[str, float] = {}
    usual = cuda_plan.PROGRAMS, cuda_plan.LARGE_STAGE, cuda_plan.SPANS_STAGES, cuda.PRODUCTS
    for programs, stage, stages in product((2, 3, 4, 6), (32768, 65536), (2, 3)):
        cuda_plan.PROGRAMS, cuda_plan.LARGE_STAGE, cuda_plan.SPANS_STAGES = programs, stage, stages
        name = f"attention: {programs} programs, {stage >> 10} KiB, {stages} stages"
        found[name] = timed(layers.parts(ratio)["attention"], repeats)
    cuda_plan.PROGRAMS, cuda_plan.LARGE_STAGE, cuda_plan.SPANS_STAGES = usual[:3]
    for products in (32, 64, 128, 256):
        cuda.PRODUCTS = products
        found[f"scores: {products} vectors"] = timed(layers.parts(ratio)["scores"], repeats)
    cuda.PRODUCTS = usual[3]
    streamed = cuda_fused.STREAMED, cuda_fused.STAGES, cuda_fused.PROGRAMS
    for setting in ((64, 6, 4), (64, 6, 3), (64, 8, 3), (128, 4, 3), (128, 6, 2), (32, 8, 6)):
        cuda_fused.STREAMED, cuda_fused.STAGES, cuda_fused.PROGRAMS = setting
        name = "scores, fused: {} vectors, {} stages, {} programs".format(*setting)
        found[name] = timed(layers.parts(ratio)["scores, fused"], repeats)
    cuda_fused.STREAMED, cuda_fused.STAGES, cuda_fused.PROGRAMS = streamed
    usual_rank = cuda_fused.RANKED_AT_ONCE, cuda_fused.RANKED_BY
    for setting in ((64, 128), (32, 128), (32, 256), (16, 256), (16, 512), (32, 512), (8, 1024), (16, 1024)):
        cuda_fused.RANKED_AT_ONCE, cuda_fused.RANKED_BY = setting
        name = "ranking, fused: {} compared with {}".format(*setting)
        found[name] = timed(layers.parts(ratio)["ranking and hand-over, fused"], repeats)
    cuda_fused.RANKED_AT_ONCE, cuda_fused.RANKED_BY = usual_rank
    usual_share = cuda_fused.PARTS, cuda_fused.SHARES
    for setting in ((16, 32), (64, 32), (32, 16), (16, 16), (64, 16), (32, 64)):
        cuda_fused.PARTS, cuda_fused.SHARES = setting
        name = "scores, fused: {} parts, {} shares".format(*setting)
        found[name] = timed(layers.parts(ratio)["scores, fused"], repeats)
    cuda_fused.PARTS, cuda_fused.SHARES = usual_share
    for name, spent in sorted(found.items(), key=lambda item: item[1]):
        print(f"    {spent:7.1f}  {name}", flush=True)
    return found


def timed(part: Part, repeats: int) -> float:
    """Microseconds of a layer."""
    for layer in range(LAYERS):
        part(layer)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        kept = [part(layer) for layer in range(LAYERS)]
    graph.replay()
    spent = statistics.median(milliseconds(graph.replay) for _ in range(repeats))
    del kept
    return spent * 1e3 / LAYERS


if __name__ == "__main__":
    main()
