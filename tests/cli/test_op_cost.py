"""`gaudi-ucm op-cost`: the ratios that the hpu implementation keeps, and what the options change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B, device_spec
from vllm_gaudi_ucm.graphs.cost.step_cost import CostModel
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.strategies.file import write_bucket_file
from vllm_gaudi_ucm.ops.unified_attention.impl.hpu import kernels as hpu_kernels
from vllm_gaudi_ucm_tools.op_cost.batch import BATCHES, Batch
from vllm_gaudi_ucm_tools.op_cost.operator_cost import trace
from vllm_gaudi_ucm_tools.op_cost.row import fused_kernel
from vllm_gaudi_ucm_tools.op_cost.work import full_work, least_work

pytestmark = pytest.mark.slow  # traces many batches through every implementation

META: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
KV = 2 * 8 * 128 * 2  # bytes of a token's keys and values
ROW = 2 * 32 * 128 * 2  # bytes of a row's query and result
# (batch, form) -> FLOPs over the least: what is reached, with a little room
REACHED = {
    ("decode", "step"): 1.01,
    ("decode", "bucket"): 1.01,
    ("shared-prefix", "step"): 1.01,
    ("shared-prefix", "bucket"): 1.01,
    ("mixed", "step"): 1.3,
    ("mixed", "bucket"): 1.3,
    ("packed-prefill", "bucket"): 1.3,
}


def op_cost(capsys: pytest.CaptureFixture[str], *argv: str | Path | int) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["op-cost", "--json", *map(str, argv)]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def rows_by(value: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["name"], row["form"], row["implementation"]): row for row in value["rows"]}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, few heads: fast to trace."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": 1000, "dtype": "bfloat16", **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("batch", ["shared-prefix", "mixed", "decode", "packed-prefill"])
def test_hpu_keeps_its_ratios(batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of operators, not times: the same on every machine."""
    rows = rows_by(op_cost(capsys, "--batch", batch, "--max-model-len", 16384))
    for (name, form), flops in REACHED.items():
        if name == batch:
            row = rows[name, form, "hpu"]
            assert 1 <= row["flops_ratio"] <= flops, form
            reference = rows[name, form, "reference"]
            # a chunk of rows is multiplied with all keys before its end
            assert row["flops"] <= 1.01 * reference["flops"]
    if batch == "packed-prefill":
        assert rows[batch, "bucket", "hpu"]["shape"] == ["c--", 8192, 0, 0, 0, 2]
        # what it would be if the bucket did not say how long prompts are
        assert rows[batch, "unbounded", "hpu"]["flops_ratio"] > 10


def test_a_prompt_alone_by_the_fused_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    """In four chunks of rows, each with the keys up to its last row; scores are never in the card's memory."""
    rows = rows_by(op_cost(capsys, "--batch", "prefill"))
    for form in ("step", "bucket"):
        row = rows["prefill", form, "hpu"]
        assert 1 <= row["flops_ratio"] <= 1.3
        assert row["operators"] <= 150


def test_the_fused_kernel_by_hand() -> None:
    """q [1, 4, 6, 8] over 10 keys of 2 heads: read once, written once, two products and five operations per score."""
    q, k, mask = torch.empty(1, 4, 6, 8, **META), torch.empty(1, 2, 10, 8, **META), torch.empty(1, 1, 6, 10, **META)
    with fused_kernel():
        sdpa = hpu_kernels.FUSED_SDPA
    assert sdpa is not None
    (masked,) = trace(sdpa, q, k, k, mask, 0.0, False, 1.0, "None", True).operations
    (causal,) = trace(sdpa, q, k, k, None, 0.0, True, 1.0, "None", True).operations
    pairs = 4 * 6 * 10
    assert (masked.matrix, causal.matrix) == (pairs * 2 * 16, pairs * 16)
    assert (masked.vector, causal.vector) == (pairs * 5, pairs * 4 / 2)
    assert sum(access.used for access in masked.reads) == 2 * (4 * 6 * 8 + 2 * 2 * 10 * 8 + 60)
    assert [access.used for access in masked.writes] == [2 * 4 * 6 * 8]
    assert hpu_kernels.FUSED_SDPA is None, "outside there are those of this machine"


def test_the_least_that_steps_need() -> None:
    """covers: A15. By hand: pairs, tokens and rows of each workload."""
    least = {name: least_work(batch.plan(128), LLAMA_8B) for name, batch in BATCHES.items()}
    flops = 4 * 32 * 128
    assert least["decode"].flops == flops * 64 * 8192
    assert least["decode"].bytes == 64 * 8192 * KV + 64 * ROW
    assert least["shared-prefix"].flops == flops * 64 * (8192 + 512)
    assert least["shared-prefix"].bytes == (8192 + 64 * 512) * KV + 64 * ROW
    assert least["mixed"].flops == flops * (2048 * 2049 // 2 + 32 * 4096)
    assert least["mixed"].bytes == (2048 + 32 * 4096) * KV + (2048 + 32) * ROW
    assert least["packed-prefill"].flops == flops * 16 * (512 * 513 // 2)
    assert least["packed-prefill"].bytes == 8192 * (KV + ROW)
    chunk = Batch("", "", [(256, 100)])
    assert least_work(chunk.plan(128), LLAMA_8B).flops == flops * (100 * 256 + 100 * 101 // 2)
    assert full_work("-su", 4, 2, 3, 128, LLAMA_8B).flops == flops * (4 * 2 + 3) * 128


def test_modelled_times_follow_from_counts(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = op_cost(capsys, "--model", small, "--batch", "shared-prefix")
    assert value["modelled"] is True
    assert "Nothing was measured" in value["assumptions"]
    for row in value["rows"]:
        for name, device in row["devices"].items():
            figures = value["figures"][name]
            times = (
                row["flops"] / figures["flops"],
                device["bytes"] / figures["bandwidth"],
                row["vector_elements"] / figures["vector_operations"],
            )
            assert device["modelled_seconds"] == pytest.approx(max(times))
            assert device["modelled_seconds"] >= device["least_modelled_seconds"]


def test_block_size_and_longest_request_change_the_counts(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How long a request may be matters to a bucket that does not say how long its requests are."""
    plain = rows_by(op_cost(capsys, "--model", small, "--batch", "packed-prefill"))
    long = rows_by(op_cost(capsys, "--model", small, "--batch", "packed-prefill", "--max-model-len", 2048))
    found = [plain["packed-prefill", form, "hpu"]["flops"] for form in ("unbounded", "bucket")]
    assert long["packed-prefill", "unbounded", "hpu"]["flops"] > 1.4 * found[0]
    assert long["packed-prefill", "bucket", "hpu"]["flops"] == found[1] < found[0]
    blocks = rows_by(op_cost(capsys, "--model", small, "--batch", "shared-prefix", "--block-size", 64))
    assert blocks["shared-prefix", "step", "hpu"]["shape"] == ["-su", 64, 128, 512]


def test_buckets_of_a_file(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Largest first; without traffic a bucket is measured against a step that fills it."""
    limits = ("--max-num-batched-tokens", 64, "--max-num-seqs", 8, "--max-model-len", 512, "--num-blocks", 40)
    file = tmp_path / "buckets.yaml"
    shapes = [ForwardShape("--u", 8, 0, 16), ForwardShape("c--", 32, 0, 0)]
    cost = CostModel(device_spec("gaudi2"), LLAMA_8B, 128)
    write_bucket_file(file, BucketSet(shapes, [8], Limits(64, 8, 512, 128, 40, False, 8), cost), {})
    value = op_cost(capsys, "--model", small, "--buckets", file, *limits, "--rows", 100)
    names = [row["name"] for row in value["rows"] if row["implementation"] == "hpu"]
    assert {"--u 8 0 16", "c-- 32 0 0"} < set(names)
    assert names[0].startswith("csu 64 "), "the configured maximum is always there"
    decode = rows_by(value)["--u 8 0 16", "bucket", "hpu"]
    assert decode["steps"] is None
    assert decode["flops_ratio"] == 1
    few = op_cost(capsys, "--model", small, "--buckets", file, *limits, "--rows", 1)
    assert len(few["rows"]) == 2


def test_buckets_in_use(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Padding counts: the steps of a bucket need less than it computes."""
    log = tmp_path / "chat.jsonl"
    assert cli.main(["trace", "--mix", "chat", "--steps", "200", "-o", str(log)]) == 0
    value = op_cost(capsys, "--model", small, "--log", log, "--rows", 2, "--max-graphs", 6)
    assert len(value["rows"]) == 4
    for row in value["rows"]:
        assert row["steps"] > 0
        assert row["flops_ratio"] >= 1


def test_table_and_picture(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "cost.png"
    argv = ["op-cost", "--model", str(small), "--batch", "shared-prefix", "--plot", str(picture)]
    assert cli.main([*argv, "--device", "gaudi3"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("every figure is modelled", "Bytes are those of gaudi3", "Nothing was measured", "shared-prefix"):
        assert words in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "h200"], "--device is 'h200': operators are counted for gaudi2, gaudi3"),
        (["--num-blocks", "9"], "--num-blocks: of buckets; give --strategy"),
        (["--rows", "3"], "--rows: of buckets"),
        (["--max-graphs", "3"], "--max-graphs: of buckets"),
        (["--batch", "decode", "--strategy", "linear"], "--batch: a workload has no buckets"),
        (["--strategy", "linear", "--rows", "0"], "--rows is 0, expected at least 1"),
        (["--block-size", "0"], "--block-size is 0"),
        (["--plot", "cost.txt"], "expected a name that ends in .png"),
    ],
)
def test_what_does_not_fit_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["op-cost", *argv]) == 2
    assert message in capsys.readouterr().err
