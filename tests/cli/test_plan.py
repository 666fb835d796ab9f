"""`gaudi-ucm plan`: sums that agree with its parts, for a mix, a log, a bucket file and bare limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_gaudi_ucm.cli import main as cli
from vllm_gaudi_ucm.config.graphs_config import GraphsConfig
from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.decisions.bucket_choice import choose_buckets, server_limits
from vllm_gaudi_ucm.execution.bucketed_execution import remainder_shapes
from vllm_gaudi_ucm.graphs.cost.specs import LLAMA_8B
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.warm_up.order import choose_skeleton
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.sparse_worker import ServerSizes, selection_limits
from vllm_gaudi_ucm_tools.buckets.compile_cost import (
    DECODE_NODES,
    GAUDI_COMPILE,
    LAYER_NODES,
    MOST_NODES,
    OUTER_NODES,
)

pytestmark = pytest.mark.slow  # plans many sets of buckets

SMALL_MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "agentic.jsonl"
    assert cli.main(["trace", "--mix", "agentic", "--steps", "500", "-o", str(path)]) == 0
    return path


def plan(capsys: pytest.CaptureFixture[str], *argv: str | Path | int) -> dict[str, Any]:
    capsys.readouterr()
    code = cli.main(["plan", "--json", *map(str, argv)])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if value["memory_bytes"]["fits"] else 1)
    return value


def test_bare_limits_fill_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys)
    memory = value["memory_bytes"]
    assert value["modelled"] is True
    assert value["strategy"] == "padding_aware"
    assert value["padding"] is None
    assert value["graphs"] == len(value["forward"]) + len(value["logits"]) <= 64
    assert memory["weights"] == LLAMA_8B.weight_bytes
    assert memory["kv_cache"] == value["limits"]["num_blocks"] * 128 * LLAMA_8B.kv_bytes_per_token
    assert memory["total"] == sum(memory[name] for name in ("weights", "adapters", "kv_cache", "graphs", "activations"))
    assert 0.8 * memory["usable"] < memory["total"] <= memory["usable"]


ENCODER = {
    "model_type": "bert",
    "num_hidden_layers": 6,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "dtype": "float32",
}


def test_an_encoder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It has no cache, no graphs for logits, and prompts of one length at most; BERT's base has 10.6 million weights in
    its linear layers.
    """
    (tmp_path / "config.json").write_text(json.dumps(ENCODER))
    value = plan(capsys, "--model", tmp_path, "--device", "cpu", "--max-graphs", 8)
    limits, memory = value["limits"], value["memory_bytes"]
    assert (limits["max_model_len"], limits["num_blocks"]) == (512, 1)
    assert value["logits"] == value["skeleton"]["logits"] == []
    assert value["graphs"] == len(value["forward"])
    assert {shape[0] for shape in value["forward"]} == {"c--"}, "prompts, without a context"
    assert memory["kv_cache"] == 0
    assert memory["weights"] == 4 * (6 * (4 * 384 * 384 + 2 * 384 * 1536) + 30522 * 384)
    for options, says in (
        (["--num-blocks", "64"], "an encoder has no KV cache"),
        (["--mix", "agentic"], "only reads prompts"),
        (["--runner", "generate"], "yields no tokens"),
    ):
        assert cli.main(["plan", "--model", str(tmp_path), *options]) == 2
        assert says in capsys.readouterr().err


def test_a_decoder_that_pools(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It keeps its cache, and needs no memory for logits."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    options = ("--model", tmp_path, "--device", "cpu", "--num-blocks", 500, "--max-graphs", 12)
    answers, pools = plan(capsys, *options), plan(capsys, *options, "--runner", "pooling")
    assert pools["forward"] == answers["forward"]
    assert pools["graphs"] == answers["graphs"] - len(answers["logits"])
    one, other = pools["memory_bytes"], answers["memory_bytes"]
    assert one["kv_cache"] == other["kv_cache"] > 0
    assert one["activations"] < other["activations"]
    assert pools["warmup_seconds"]["high"] < answers["warmup_seconds"]["high"]


def test_devices_share_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory, shapes and times are of one device; what they spend on adding up is named."""
    one, four = plan(capsys), plan(capsys, "--tensor-parallel-size", 4)
    assert one["devices"]["reduction_share"] == {"decode": 0.0, "largest": 0.0}
    assert four["devices"]["kv_heads"] == 2
    assert four["memory_bytes"]["weights"] == one["memory_bytes"]["weights"] / 4
    assert four["limits"]["num_blocks"] > 4 * one["limits"]["num_blocks"]
    assert 0 < four["devices"]["reduction_share"]["largest"] < four["devices"]["reduction_share"]["decode"] < 1
    assert cli.main(["plan", "--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "devices   8: 4 share each layer, 2 stages" in shown
    assert "of a step of 64 decodes" in shown
    assert cli.main(["plan", "--tensor-parallel-size", "3"]) != 0
    assert "--tensor-parallel-size is 3" in capsys.readouterr().err


def test_steps_are_divided_by_their_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """As a server does it; every bucket says what its attention takes."""
    sizes = ("--max-model-len", 131072, "--max-graphs", 8)
    value = plan(capsys, *sizes)
    most = max(graph.get("attention_bytes", 0) for graph in value["compilation"])
    assert 1 << 30 < most <= value["memory_bytes"]["activations"]
    limits = value["limits"]
    assert value["asked_tokens"] == 2048
    assert 1024 <= limits["max_shared_blocks"] < 2048, "the context of one request, but not of two"
    assert 64 <= limits["max_num_batched_tokens"] < 2048
    assert plan(capsys, *sizes, "--step-memory", 64)["limits"]["max_num_batched_tokens"] == 2048
    cli.main(["plan", *map(str, sizes)])
    assert "a server lowers 2048 tokens to that" in capsys.readouterr().out


def test_fewer_graphs_warm_sooner_and_take_less(capsys: pytest.CaptureFixture[str]) -> None:
    """covers: B7."""
    few, many = plan(capsys, "--max-graphs", 16), plan(capsys, "--max-graphs", 128)
    for bound in ("low", "high"):
        assert few["warmup_seconds"][bound] < many["warmup_seconds"][bound]
        assert few["skeleton_seconds"][bound] <= few["warmup_seconds"][bound]
    assert few["memory_bytes"]["graphs"] < many["memory_bytes"]["graphs"]


def test_compilation_is_modelled_from_the_nodes_of_every_graph(capsys: pytest.CaptureFixture[str]) -> None:
    """One decoder layer is compiled for all, so layers do not count; the totals are those of the graphs, and a run."""
    value = plan(capsys, "--max-graphs", 16)
    graphs = value["compilation"]
    assert [graph["graph"] for graph in graphs] == [*value["forward"], *value["logits"]]
    assert value["nodes_counted"] is False
    for graph in graphs:
        expected = GAUDI_COMPILE.seconds(graph["nodes"])
        assert graph["seconds"] == {"low": round(expected.low, 3), "high": round(expected.high, 3)}
        if isinstance(graph["graph"], list):
            most = MOST_NODES if "c" in graph["graph"][0] else DECODE_NODES
            assert graph["nodes"] == most + LAYER_NODES + OUTER_NODES
    for bound in ("low", "high"):
        compiled = sum(graph["seconds"][bound] for graph in graphs)
        assert compiled <= value["warmup_seconds"][bound] <= 1.5 * compiled
    assert value["warmup_seconds"]["low"] < value["warmup_seconds"]["high"]
    assert cli.main(["plan", "--max-graphs", "16"]) == 0
    out = capsys.readouterr().out
    assert "compilation, modelled from nodes: low - high" in out
    assert "nodes, at most" in out
    assert cli.main(["plan", "--max-graphs", "16", "--device", "h200"]) == 0
    assert "nodes, at most" not in capsys.readouterr().out, "a capture takes the same, whatever is in it"


def test_nodes_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In small buckets, where counting takes no time; more parts, more nodes."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    sizes = ("--max-num-batched-tokens", 128, "--max-num-seqs", 4, "--max-model-len", 1024, "--num-blocks", 40)
    value = plan(capsys, "--model", tmp_path, *sizes, "--max-graphs", 8, "--count-nodes")
    assert value["nodes_counted"] is True
    nodes = {graph["graph"][0]: graph["nodes"] for graph in value["compilation"] if isinstance(graph["graph"], list)}
    assert min(nodes.values()) > LAYER_NODES + OUTER_NODES + 10
    assert nodes["csu"] == max(nodes.values())


def test_the_skeleton_is_the_servers(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the dearest graphs, but those that serve the expected steps best beside the maximum."""
    options = ("--log", log, "--strategy", "padding_aware")
    value = plan(capsys, *options)
    skeleton = value["skeleton"]
    size = len(skeleton["forward"])
    assert size == GraphsConfig().skeleton
    assert skeleton["forward"][0] == value["forward"][-1], "the maximum is warmed first"
    assert not any(shape in value["forward"][-size:] for shape in skeleton["forward"][1:]), "the dearest save nothing"
    first, everything = value["skeleton_seconds"], value["warmup_seconds"]
    assert all(first[bound] <= 0.1 * everything[bound] for bound in ("low", "high"))
    assert value["skeleton_share"] == pytest.approx(first["high"] / everything["high"], abs=1e-4)
    larger = plan(capsys, *options, "--skeleton", 8)
    assert larger["skeleton"]["forward"][:size] == skeleton["forward"]
    assert value["skeleton_seconds"]["low"] < larger["skeleton_seconds"]["low"]
    assert cli.main(["plan", "--skeleton", "0"]) == 2
    assert "--skeleton is 0, expected at least 1" in capsys.readouterr().err


GAUDI2 = SimpleNamespace(kind="hpu", name=lambda: "GAUDI2")


def served(
    num_blocks: int, *, contiguous: bool = False, choices: SelectionLimits | None = None, **options: Any
) -> tuple[BucketSet, Steps | None, GraphsConfig]:
    """What a server on a Gaudi 2 with the limits of the mix `agentic` chooses."""
    graphs = resolve_config({"ucm": {"graphs": options}}).graphs
    model = SimpleNamespace(
        max_model_len=16384, use_mla=False, hf_text_config=SimpleNamespace(to_dict=lambda: SMALL_MODEL)
    )
    scheduler = SimpleNamespace(max_num_batched_tokens=4096, max_num_seqs=48)
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    engine: Any = SimpleNamespace(scheduler_config=scheduler, model_config=model, parallel_config=parallel)
    device: Any = GAUDI2
    selected = 0 if choices is None else choices.max_selected_blocks
    limits = server_limits(engine, 128, num_blocks, contiguous, graphs.max_shared_blocks, selected)
    remainders = remainder_shapes(limits, choices)
    num_remainders, live, rows = 0 if remainders is None else len(remainders.keys), 0, 1
    if choices is not None:
        live, rows = choices.room_for_live_blocks, choices.max_rows
    return *choose_buckets(graphs, engine, limits, device, num_remainders, live, rows), graphs


SERVER_OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "blind": {"strategy": "exponential", "max_graphs": 24, "skeleton": 2},
    "few shared blocks": {"max_shared_blocks": 130, "max_graphs": 32},
    "trace": {"max_graphs": 12, "trace": "log"},
    "trace, few shared blocks": {"max_graphs": 12, "trace": "log", "max_shared_blocks": 130},
    "file": {"buckets": "file"},
    "contiguous": {"contiguous": True, "max_graphs": 32},
}


@pytest.mark.parametrize("name", SERVER_OPTIONS)
def test_plan_and_server_choose_the_same(
    name: str, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is chosen, before anyone pays: the same buckets, and the same of them first."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    file = tmp_path / "buckets.yaml"
    files = {"log": str(log), "file": str(file)}
    options = {key: files.get(value, value) for key, value in SERVER_OPTIONS[name].items()}
    limits = {"max_num_batched_tokens": 4096, "max_num_seqs": 48, "max_model_len": 16384, "num_blocks": 3400}
    if name == "file":
        assert cli.main(["tune", str(log), "--max-graphs", "10", "--gap", "1", "-o", str(file)]) == 0
    argv = [f"--{'log' if key == 'trace' else key.replace('_', '-')}={value}" for key, value in options.items()]
    argv = ["--contiguous" if option == "--contiguous=True" else option for option in argv]
    argv += [f"--{key.replace('_', '-')}={value}" for key, value in limits.items()]
    planned = plan(capsys, "--model", tmp_path, *argv)
    buckets, usage, graphs = served(3400, **options)
    assert planned["forward"] == [shape.to_list() for shape in buckets.forward]
    assert planned["logits"] == list(buckets.logits)
    skeleton = choose_skeleton(buckets, usage, graphs.skeleton)
    assert planned["skeleton"] == {"forward": [s.to_list() for s in skeleton.forward], "logits": skeleton.logits}
    assert planned["limits"]["max_shared_blocks"] == buckets.limits.max_shared_blocks
    assert planned["limits"]["contiguous"] == buckets.limits.contiguous


def edited(log: Path, path: Path, bucket: list[Any], **header: object) -> Path:
    """A copy of the log with one more step, and with other fields in its first line; None removes one."""
    head, *steps = log.read_text().splitlines()
    first = {key: value for key, value in (json.loads(head) | header).items() if value is not None}
    step = json.loads(steps[-1]) | {"bucket": bucket}
    path.write_text("\n".join([json.dumps(first), *steps, json.dumps(step), ""]))
    return path


def test_steps_that_the_server_divides_are_counted(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At true shapes nothing divides steps, so their log has such. covers: B3."""
    path = edited(log, tmp_path / "phases.jsonl", ["csu", 4000, 300, 9, 2])
    wide = ("--max-graphs", 8, "--step-memory", 64)
    value = plan(capsys, "--log", path, *wide)
    assert (value["limits"]["max_shared_blocks"], value["divided_steps"]) == (256, 1)
    assert max(shape[2] for shape in value["forward"]) == 256
    assert plan(capsys, "--log", path, *wide, "--max-shared-blocks", 300)["divided_steps"] == 0
    assert plan(capsys, "--log", path, "--max-graphs", 8)["divided_steps"] >= 1, "by their memory"
    cli.main(["plan", "--log", str(path), *map(str, wide)])
    assert "steps with more than 256 shared blocks, which run in parts: 1" in capsys.readouterr().out


@pytest.mark.parametrize(("logged", "planned"), [(True, True), (False, False), ("auto", False), (None, False)])
def test_a_log_says_how_the_unique_part_was_read(
    logged: object, planned: bool, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto`: some steps read a slice of the cache, others gathered; the buckets of such a server gather."""
    path = edited(log, tmp_path / "phases.jsonl", ["--u", 4, 0, 3400, 4], contiguous=logged)
    value = plan(capsys, "--log", path, "--max-graphs", 8)
    assert value["limits"]["contiguous"] is planned
    assert max(shape[3] for shape in value["forward"]) == (3400 if planned else 3399)


def test_a_log_is_planned_with_its_own_limits(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--log", log, "--max-graphs", 32)
    assert value["strategy"] == "trace"
    assert value["limits"]["max_num_seqs"] == 48
    blind = plan(capsys, "--log", log, "--max-graphs", 32, "--strategy", "exponential")
    assert 1.0 <= value["padding"]["cost_ratio"] < blind["padding"]["cost_ratio"]


def test_a_bucket_file_is_planned(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "buckets.yaml"
    assert cli.main(["tune", str(log), "--max-graphs", "20", "--gap", "1", "-o", str(file)]) == 0
    value = plan(capsys, "--log", log, "--buckets", file)
    assert value["graphs"] <= 20
    assert cli.main(["plan", "--log", str(log), "--buckets", str(file), "--max-num-seqs", "64"]) == 2
    assert "made for max_num_seqs 48, the server has 64" in capsys.readouterr().err


def test_a_model_and_a_device_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    arguments = ["plan", "--model", str(tmp_path), "--device", "cpu", "--block-size", "16", "--num-blocks", "2000"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "2,000 blocks of 16" in out
    assert "modelled" in out
    assert all(len(line.rstrip()) <= 80 for line in out.splitlines())


def test_quantised_experts_are_counted_as_the_device_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**SMALL_MODEL, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "dtype": "bfloat16"}
    quantised = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps({**model, "quantization_config": quantised}))
    asked = ("--model", tmp_path, "--num-blocks", 200, "--max-graphs", 16)
    plans = {
        (device, kept): plan(capsys, *asked, "--device", device, "--quantised-experts", kept)["memory_bytes"]
        for device, kept in (("gaudi2", "auto"), ("h200", "auto"), ("h200", "plain"))
    }
    experts = 30 * 8 * 3 * 576 * 1536
    plain = plans["gaudi2", "auto"]["weights"]
    assert plans["h200", "plain"]["weights"] == plain
    assert plans["h200", "auto"]["weights"] == plain - experts + experts // 32**2 * 4
    assert cli.main(["plan", *map(str, asked), "--quantised-experts", "codes"]) == 2
    assert "--quantised-experts is 'codes', but on a gaudi2 the product" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({**model, "quantization_config": {"quant_method": "fp8"}}))
    held = plan(capsys, *asked, "--device", "gaudi2", "--quantised-experts", "codes")["memory_bytes"]["weights"]
    assert held == plain - experts + 30 * 8 * (2 * 1536 + 576) * 4


def test_a_mix_is_asked_of_a_server_with_the_limits_given(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--mix", "long-context", "--max-num-seqs", 8, "--max-graphs", 16, "--step-memory", 64)
    assert value["traffic"] == "long-context"
    assert value["limits"]["max_num_seqs"] == value["logits"][-1] == 8
    assert value["padding"]["maximum_steps"] <= 5, "of 5,000"
    assert cli.main(["plan", "--mix", "agentic", "--num-blocks", "40"]) == 2
    assert "besides the prefixes of the mix" in capsys.readouterr().err


def test_what_does_not_fit_exits_with_1_or_says_why(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--num-blocks", 6000)
    assert value["memory_bytes"]["fits"] is False
    assert cli.main(["plan", "--device", "cpu"]) == 2
    assert "one device cannot serve this model" in capsys.readouterr().err
    assert cli.main(["plan", "--log", str(log), "--block-size", "16"]) == 2
    assert "leave the option out" in capsys.readouterr().err
    assert cli.main(["plan", "--strategy", "trace"]) == 2
    assert "needs --log or --mix" in capsys.readouterr().err


def test_a_server_with_slots_for_tokens_is_planned(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes count ranges of blocks: those of a request are one for each strip, and some more."""
    blocks = plan(capsys, "--num-blocks", 1001, "--max-model-len", 4096)
    ranges = plan(capsys, "--num-blocks", 1001, "--max-model-len", 4096, "--granularity", "token")
    assert ranges["limits"]["strip"] == 64
    most = [max(shape[3] for shape in value["forward"]) for value in (blocks, ranges)]
    assert most == [1000, 2000]
    assert max(shape[2] for shape in ranges["forward"]) == 4096 // 64 + 16
    for argv in (["--log", str(log)], ["--mix", "chat"]):
        assert cli.main(["plan", *argv, "--granularity", "token"]) == 2
        assert "--granularity is 'token'" in capsys.readouterr().err


def test_a_server_with_a_sparse_method_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    value = plan(capsys, "--max-selected-blocks", 512, "--max-graphs", 48)
    assert value["limits"]["max_selected_blocks"] == 512
    assert value["graphs"] <= 48
    assert {len(shape) for shape in value["forward"]} == {4, 5}
    assert value["skeleton"]["forward"][0][4] == 512
    assert cli.main(["plan", "--max-selected-blocks", "512", "--max-graphs", "48"]) == 0
    assert "128 shared blocks per step, 512 selected" in capsys.readouterr().out
    assert cli.main(["plan", "--max-selected-blocks", "-1"]) == 2
    assert "max_selected_blocks is -1" in capsys.readouterr().err


PARTIAL_LOADS = {"ucm_sparse_method": "ESA", "memory_mode": {"enabled": True}}


def test_graphs_for_remainders_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the server has them: of its sizes, a part of its graphs, of their memory, and warm before it serves."""
    limits = ("--max-num-batched-tokens", 4096, "--max-num-seqs", 48, "--max-model-len", 16384, "--num-blocks", 3400)
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    argv = (*limits, "--model", tmp_path, "--max-graphs", 40, "--sparse", json.dumps(PARTIAL_LOADS))
    without, value = plan(capsys, *argv), plan(capsys, *argv, "--partial-loads")
    sizes = ServerSizes(16384, 48, 1, 128, 3400, static=True, remainder_rows=128)
    choices = selection_limits(BlockOptions(), sizes)
    buckets, _, _ = served(3400, choices=choices, max_graphs=40)
    shapes, left = remainder_shapes(buckets.limits, choices), value["graphs"] - 3
    assert shapes is not None
    assert value["tails"] == [shape.to_list() for shape in shapes.shapes]
    assert len(value["tails"]) == 3
    assert value["forward"] == [shape.to_list() for shape in buckets.forward]
    assert value["limits"]["max_selected_blocks"] == choices.max_selected_blocks
    assert value["limits"] == without["limits"]
    assert without["tails"] == []
    assert len(value["forward"]) + len(value["logits"]) == left <= 37
    assert without["graphs"] == len(without["forward"]) + len(without["logits"]) <= 40
    per_graph = without["memory_bytes"]["graphs"] / without["graphs"]
    assert value["memory_bytes"]["graphs"] == pytest.approx(value["graphs"] * per_graph)
    assert value["skeleton_seconds"]["low"] > without["skeleton_seconds"]["low"]


def test_graphs_for_sparse_prompts_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan has the server's graphs: two lengths of chunks, whose tiles choose."""
    limits = ("--max-num-batched-tokens", 4096, "--max-num-seqs", 48, "--max-model-len", 16384, "--num-blocks", 3400)
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    ucm = {"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"prompt_ratio": 0.2}}}
    value = plan(capsys, *limits, "--model", tmp_path, "--max-graphs", 40, "--sparse", json.dumps(ucm))
    sizes = ServerSizes(16384, 48, 1, 128, 3400, static=True, remainder_rows=4096)
    choices = selection_limits(BlockOptions(prompt_ratio=0.2), sizes)
    buckets, _, _ = served(3400, choices=choices, max_graphs=40)
    shapes = remainder_shapes(buckets.limits, choices)
    assert shapes is not None
    assert value["tails"] == [shape.to_list() for shape in shapes.shapes]
    assert len(value["tails"]) == 6
    assert len(value["forward"]) + len(value["logits"]) == value["graphs"] - 6 <= 34


@pytest.mark.parametrize("more", [(), ("--partial-loads",)], ids=["alone", "with remainders"])
def test_graphs_for_verifications_are_planned(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With drafts, as the server has them: steps whose requests verify them with chosen blocks."""
    limits = ("--max-num-batched-tokens", 4096, "--max-num-seqs", 48, "--max-model-len", 16384, "--num-blocks", 3400)
    (tmp_path / "config.json").write_text(json.dumps(SMALL_MODEL))
    argv = (*limits, "--model", tmp_path, "--max-graphs", 40, "--sparse", json.dumps(PARTIAL_LOADS), *more)
    without, value = plan(capsys, *argv), plan(capsys, *argv, "--num-speculative-tokens", 4)
    sizes = ServerSizes(16384, 48, 5, 128, 3400, static=True, remainder_rows=128 if more else 0)
    choices = selection_limits(BlockOptions(), sizes)
    buckets, _, _ = served(3400, choices=choices, max_graphs=40)
    assert value["forward"] == [shape.to_list() for shape in buckets.forward]
    assert value["graphs"] <= 40
    remainders = remainder_shapes(buckets.limits, choices)
    assert value["tails"] == ([] if remainders is None else [shape.to_list() for shape in remainders.shapes])
    assert bool(value["tails"]) == bool(more)
    in_full = {shape.query_len for shape in buckets.forward if shape.phase.startswith("cs") and shape.selected_blocks}
    assert 48 * 5 in in_full, "no bucket for the verification of 4 drafts of every request"
    assert value["forward"] != without["forward"]


def test_what_is_said_of_graphs_for_remainders(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of a log that ran in one need no bucket."""
    sparse = json.dumps(PARTIAL_LOADS)
    assert cli.main(["plan", "--sparse", sparse, "--partial-loads"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^graphs +64: .* 3 for remainders$", out, re.MULTILINE)
    assert "until serving starts (3 forward, 1 logits, 3 for remainders)" in out
    assert cli.main(["plan", "--max-selected-blocks", "512"]) == 0
    assert "without those for prompt remainders" in capsys.readouterr().out
    path = edited(log, tmp_path / "phases.jsonl", ["cs-", 100, 4, 0, 1, 9], max_selected_blocks=500)
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"prompt_remainder": 1}), ""]))
    argv = ("--log", path, "--max-graphs", 16, "--strategy", "padding_aware")
    value = plan(capsys, *argv)
    assert value["tail_steps"] == 1
    assert value["padding"] == plan(capsys, *argv[2:], "--log", log, "--max-selected-blocks", 500)["padding"]
    assert cli.main(["plan", *map(str, argv)]) == 0
    assert "steps in graphs for prompt remainders, which are in no other figure: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--partial-loads"], "--partial-loads needs --sparse"),
        (["--num-speculative-tokens", "-1"], "--num-speculative-tokens is -1, expected 0 or more"),
        (["--kept-states", "2"], "--kept-states: no layer of the model keeps a state"),
        (["--kept-states", "-1"], "--kept-states is -1, expected 0 or more"),
        (["--sparse", "{}"], "ucm_sparse_method is None"),
        (["--sparse", '{"ucm_sparse_method": "GSA"}', "--partial-loads"], "memory_mode.enabled of --sparse is false"),
        (["--sparse", json.dumps(PARTIAL_LOADS), "--max-selected-blocks", "9"], "leave one out"),
        (["--sparse", '{"ucm_sparse_methd": "GSA"}'], "ucm.ucm_sparse_methd: found an unknown key"),
    ],
)
def test_sparse_options_that_do_not_go_together(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *argv]) == 2
    assert said in capsys.readouterr().err


def test_a_log_with_selected_blocks_goes_all_the_way(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the log to a bucket file, a plan and a page."""
    path, file, page = tmp_path / "phases.jsonl", tmp_path / "buckets.yaml", tmp_path / "steps.html"
    edited(log, path, ["-su", 4, 2, 9, 4, 300], max_selected_blocks=500)
    assert cli.main(["tune", str(path), "--max-graphs", "12", "--gap", "1", "-o", str(file)]) == 0
    assert re.search(r"unique +selected +logits", capsys.readouterr().out)
    value = plan(capsys, "--log", path, "--buckets", file)
    assert value["limits"]["max_selected_blocks"] == 500
    assert max(shape[4] for shape in value["forward"] if len(shape) == 5) == 500
    assert value["padding"]["size_ratios"]["selected"] >= 1
    assert cli.main(["plan", "--log", str(path), "--buckets", str(file)]) == 0
    assert re.search(r"unique +selected +steps", capsys.readouterr().out)
    assert cli.main(["plot", str(path), "--buckets", str(file), "-o", str(page)]) == 0
    assert "-su 4 / 2 / 9 / 300" in page.read_text()
    assert "<th>selected_blocks</th>" in page.read_text()
    assert cli.main(["plan", "--log", str(edited(log, path, ["-su", 4, 2, 9, 4], max_selected_blocks="many"))]) == 2
    assert "max_selected_blocks 'many', expected a number" in capsys.readouterr().err


QWEN_VL = {
    **{**SMALL_MODEL, "model_type": "qwen2_5_vl_text", "dtype": "bfloat16"},
    "model_type": "qwen2_5_vl",
    "text_config": {**SMALL_MODEL, "model_type": "qwen2_5_vl_text"},
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    },
}


def test_encoder_of_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Weights and kept embeddings are counted before the blocks that fit, and the sizes that are warmed as graphs."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN_VL))
    without, small, large = (
        plan(capsys, "--model", file, "--device", "gaudi3", "--picture-tokens", tokens) for tokens in (0, 256, 4096)
    )
    layers = 32 * (4 * 1280**2 + 3 * 1280 * 3420)
    weights = layers + 3 * 2 * 14**2 * 1280 + 4 * 1280 * (4 * 1280 + 576)
    assert without["memory_bytes"]["encoder"] == 0
    assert small["memory_bytes"]["encoder"] == 2 * (weights + 2048 * 576)
    assert large["memory_bytes"]["encoder"] == 2 * (weights + 4096 * 576)
    # of 32, 64, 128 and 256 tokens
    assert [value["picture_graphs"] for value in (without, small, large)] == [0, 4, 8]
    assert small["graphs"] == len(small["forward"]) + len(small["logits"]) + 4
    assert large["memory_bytes"]["activations"] >= 16 * 1024 * 4 * 4096 * 4
    assert large["limits"]["num_blocks"] < without["limits"]["num_blocks"]
    assert plan(capsys, "--model", file, "--device", "h200", "--picture-tokens", 256)["picture_graphs"] == 1
    assert cli.main(["plan", "--model", str(file), "--picture-tokens", "256"]) == 0
    found = capsys.readouterr().out
    assert "for pictures" in found
    assert "encoder of pictures 1." in found


def test_sizes_of_tiles(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """InternVL pads to whole tiles of 256 tokens: 1, 2, 4, 7 and 13 of them."""
    vision = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    vision |= {"model_type": "internvl_vision", "patch_size": [14, 14], "image_size": [448, 448]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**QWEN_VL, "model_type": "internvl", "vision_config": vision}))
    found = plan(capsys, "--model", file, "--device", "gaudi3", "--picture-tokens", 13 * 256)
    assert found["picture_graphs"] == 5
    layers = 24 * (4 * 1024**2 + 2 * 1024 * 4096)
    assert found["memory_bytes"]["encoder"] >= 2 * (layers + 13 * 256 * 576)


GEMMA: dict[str, Any] = {"num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16}
GEMMA |= {"intermediate_size": 4304, "patch_size": 14}
OF_FAMILIES: list[tuple[str, dict[str, Any], int, int, int]] = [
    # pictures of one size
    ("llava", {**GEMMA, "model_type": "clip_vision_model", "image_size": 336}, 576, 1, 2),
    ("gemma3", {**GEMMA, "model_type": "siglip_vision_model", "image_size": 896}, 256, 1, 2),
    # 280, 140, 70, 35 and 18 tokens
    ("gemma4", {**GEMMA, "model_type": "gemma4_vision", "pooling_kernel_size": 3}, 280, 5, 3),
    # 1024 to 32 tokens
    ("llava", {**GEMMA, "model_type": "pixtral"}, 1024, 6, 3),
    ("mistral3", {**GEMMA, "model_type": "pixtral"}, 1024, 6, 3),
    ("qwen2_vl", {"depth": 27, "embed_dim": 1152, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14}, 1024, 6, 2),
    ("qwen3_vl", {**GEMMA, "depth": 27, "num_heads": 16}, 1024, 6, 2),
]


@pytest.mark.parametrize(
    ("family", "vision", "tokens", "sizes", "matrices"), OF_FAMILIES, ids=[f"{one[0]}-{one[2]}" for one in OF_FAMILIES]
)
def test_encoders_of_each_family(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    family: str,
    vision: dict[str, Any],
    tokens: int,
    sizes: int,
    matrices: int,
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**QWEN_VL, "model_type": family, "vision_config": vision}))
    found = plan(capsys, "--model", file, "--device", "gaudi3", "--picture-tokens", tokens)
    assert found["picture_graphs"] == sizes
    layers = 27 * (4 * 1152**2 + matrices * 1152 * vision.get("intermediate_size", 4 * 1152))
    assert 2 * layers <= found["memory_bytes"]["encoder"] < 2.6 * layers


def test_pictures_without_an_encoder_are_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["plan", "--picture-tokens", "64"]) != 0
    assert "--picture-tokens needs --model" in capsys.readouterr().err
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL_MODEL))
    assert cli.main(["plan", "--model", str(file), "--picture-tokens", "64"]) != 0
    assert "vision_config is missing" in capsys.readouterr().err
    file.write_text(json.dumps({**QWEN_VL, "vision_config": {"depth": 32}}))
    assert cli.main(["plan", "--model", str(file), "--picture-tokens", "64"]) != 0
    assert "vision_config.embed_dim is None, expected a number" in capsys.readouterr().err
    assert cli.main(["plan", "--model", str(file), "--picture-tokens", "-1"]) != 0
    assert "--picture-tokens is -1, expected 0 or more" in capsys.readouterr().err


def test_slots_of_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """Their memory is counted before the blocks that fit; whole first matrices are on every device."""
    without, eight, shared = (
        plan(capsys, *more)
        for more in ((), ("--max-loras", 8), ("--max-loras", 8, "--tensor-parallel-size", 2, "--max-lora-rank", 16))
    )
    m = LLAMA_8B
    attention = 3 * m.hidden + m.heads * 128 + 2 * m.kv_heads * 128 + m.heads * 128 + m.hidden
    mlp = 2 * (m.hidden + m.intermediate) + m.intermediate + m.hidden
    expected = 8 * 16 * 2 * (m.layers * (attention + mlp) + 2 * (m.vocab + m.hidden))
    assert without["memory_bytes"]["adapters"] == 0
    assert eight["memory_bytes"]["adapters"] == expected
    assert eight["limits"]["num_blocks"] < without["limits"]["num_blocks"]
    assert expected / 2 < shared["memory_bytes"]["adapters"] < expected
    assert cli.main(["plan", "--max-loras", "8"]) == 0
    assert "slots for adapters 0." in capsys.readouterr().out
    assert cli.main(["plan", "--max-loras", "1", "--max-lora-rank", "0"]) != 0
    assert "--max-lora-rank is 0, expected at least 1" in capsys.readouterr().err


def test_states_of_requests_and_kept_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each running request has a state for each draft and one more; blocks get what is left."""
    lfm2 = {**SMALL_MODEL, "model_type": "lfm2", "conv_L_cache": 3}
    lfm2["layer_types"] = ["conv", "conv", "full_attention"] * 10
    file = tmp_path / "config.json"
    file.write_text(json.dumps(lfm2))
    argv = ("--model", file, "--max-num-seqs", 8)
    running, kept, drafted = (
        plan(capsys, *argv, *more) for more in ((), ("--kept-states", 1000), ("--num-speculative-tokens", 3))
    )
    each = 20 * 2 * 576 * 4
    found = [one["memory_bytes"]["states"] for one in (running, kept, drafted)]
    assert found == [each * (8 + 2), each * (1000 + 8 + 2), each * (8 * 4 + 2)]
    assert kept["limits"]["num_blocks"] < running["limits"]["num_blocks"]
    assert cli.main(["plan", *map(str, argv), "--kept-states", "1000"]) == 0
    assert "states of requests 0." in capsys.readouterr().out
