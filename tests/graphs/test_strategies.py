"""Strategies: reachable buckets, bounded counts, odd limits, bucket files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from runpy import run_path

import pytest

from tests.graphs.outside_strategy import Powers
from tests.graphs.shapes import COST, LIMITS, ODD_LIMITS, SPARSE_LIMITS
from tests.graphs.warm_up.look_up import look_up
from vllm_gaudi_ucm.cli.doctor.configuration import static_shape_checks
from vllm_gaudi_ucm.cli.main import main
from vllm_gaudi_ucm.config.ucm_config import describe, resolve_value
from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, ForwardShape, dominates
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm.graphs.shapes.size_levels import reaching_step, without_unreachable
from vllm_gaudi_ucm.graphs.shapes.steps import Steps
from vllm_gaudi_ucm.graphs.strategies import STRATEGIES, blind_strategies, build_buckets
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest
from vllm_gaudi_ucm.graphs.strategies.file import BucketFileError, write_bucket_file
from vllm_gaudi_ucm.graphs.strategies.grid import Exponential, Linear, PaddingAware
from vllm_gaudi_ucm.graphs.warm_up.ready_buckets import ReadyBuckets
from vllm_gaudi_ucm.options.errors import UcmConfigError


def assert_all_reachable(buckets: BucketSet) -> None:
    for shape in buckets.forward:
        if shape == buckets.limits.maximum.forward:
            continue
        step = reaching_step(buckets, shape)
        assert step is not None, shape
        assert buckets.limits.allows("c" in step.phase, *step.forward.sizes[:4])
        assert buckets.lookup(step).forward == shape


@pytest.mark.parametrize("max_graphs", [2, 5, 24, 64])
@pytest.mark.parametrize("name", ODD_LIMITS)
@pytest.mark.parametrize("strategy", blind_strategies())
def test_buckets_are_reachable_and_counted(strategy: str, name: str, max_graphs: int) -> None:
    """covers: A17, B1, B4."""
    within = ODD_LIMITS[name]
    buckets = build_buckets(strategy, BucketRequest(within, COST, max_graphs))
    assert buckets.num_graphs <= max_graphs
    assert buckets.lookup(within.maximum) == within.maximum
    assert_all_reachable(buckets)


@pytest.mark.parametrize("rows_each", [2, 4, 7])
@pytest.mark.parametrize("name", ODD_LIMITS)
@pytest.mark.parametrize("strategy", blind_strategies())
def test_verifications_have_buckets(strategy: str, name: str, rows_each: int) -> None:
    """A step in which all requests verify drafts computes no row of a prompt: such a bucket is a part of the coarsest
    grid. covers: B1, B4."""
    within = ODD_LIMITS[name]
    request = BucketRequest(within, COST, 64, rows_each=rows_each)
    buckets = build_buckets(strategy, request)
    assert buckets.num_graphs <= 64
    assert_all_reachable(buckets)
    rows = rows_each * within.max_decode_rows
    shape = ForwardShape.from_sizes(True, rows, *((1, 0) if within.most_shared_blocks else (0, 1)))
    if rows < within.max_num_batched_tokens and within.allows(True, *shape.sizes[:4]):
        assert buckets.lookup(shape.step(1)).forward.query_len == rows


@pytest.mark.parametrize("name", ["one request", "huge cache"])
@pytest.mark.parametrize("strategy", blind_strategies())
def test_verifications_share_buckets_with_prompts_where_graphs_are_few(strategy: str, name: str) -> None:
    """covers: B4."""
    request = BucketRequest(ODD_LIMITS[name], COST, rows_each=4)
    least = STRATEGIES.get(strategy)().least_graphs(request)
    few = replace(request, max_graphs=least)
    assert build_buckets(strategy, few).forward == build_buckets(strategy, replace(few, rows_each=1)).forward


@pytest.mark.parametrize("max_graphs", [2, 7, 64])
@pytest.mark.parametrize("name", SPARSE_LIMITS)
@pytest.mark.parametrize("strategy", blind_strategies())
def test_buckets_with_selected_blocks_are_reachable_and_counted(strategy: str, name: str, max_graphs: int) -> None:
    """covers: A17, B1, B4."""
    within = SPARSE_LIMITS[name]
    buckets = build_buckets(strategy, BucketRequest(within, COST, max_graphs))
    assert buckets.num_graphs <= max_graphs
    assert buckets.lookup(within.maximum) == within.maximum
    assert_all_reachable(buckets)


@pytest.mark.parametrize("strategy", blind_strategies())
def test_other_sizes_keep_their_graphs_beside_size_levels(strategy: str) -> None:
    """A decode has graphs with and without a selected part, a long prompt one for both."""
    within = Limits(2048, 64, 8192, 128, 3000, contiguous=False, max_selected_blocks=1024)
    buckets = build_buckets(strategy, BucketRequest(within, COST, 64))
    assert buckets.num_graphs > 48
    assert len({shape.with_selected(0) for shape in buckets.forward}) >= 12
    assert {0, 1024} <= set(buckets.selected)
    decode, prompt = Bucket("--u", 4, 0, 100, 4), Bucket("c--", 2048, 0, 0, 1)
    assert buckets.lookup(decode).selected_blocks == 0
    assert COST.step(buckets.lookup(prompt)) <= 1.2 * COST.step(buckets.lookup(prompt)._replace(selected_blocks=0))


@pytest.mark.parametrize("strategy", blind_strategies())
def test_long_steps_of_prompts_have_a_graph_for_short_ones(strategy: str) -> None:
    """Where that is worth a tenth of the step, and only on a device that computes less in it."""
    within = Limits(8192, 64, 32768, 128, 3400, contiguous=False, max_shared_blocks=512, bounds_prompt_tiles=True)
    buckets = build_buckets(strategy, BucketRequest(within, COST, 64))
    plain = build_buckets(strategy, BucketRequest(replace(within, bounds_prompt_tiles=False), COST, 64))
    assert buckets.num_graphs <= 64
    assert_all_reachable(buckets)
    packed, whole = Bucket("c--", 8192, 0, 0, 16, 0, 2), Bucket("c--", 8192, 0, 0, 1)
    assert buckets.lookup(packed).max_prompt_tiles == 4
    assert 1.1 * COST.step(buckets.lookup(packed)) < COST.step(plain.lookup(packed))
    assert buckets.lookup(whole).forward == plain.lookup(whole).forward == whole.forward
    assert {shape.max_prompt_tiles for shape in plain.forward} == {ALL_TILES}
    few = replace(within, max_num_batched_tokens=2048)
    assert {shape.max_prompt_tiles for shape in build_buckets(strategy, BucketRequest(few, COST, 64)).forward} == {
        ALL_TILES
    }


@pytest.mark.parametrize("strategy", blind_strategies())
def test_more_graphs_are_used(strategy: str) -> None:
    counts = [build_buckets(strategy, BucketRequest(LIMITS, COST, most)).num_graphs for most in (16, 64, 128)]
    assert 8 <= counts[0] <= 16
    assert 48 <= counts[1] <= 64 < counts[2] <= 128


def test_size_levels_end_with_the_maximum() -> None:
    assert Exponential().levels(COST, "decode", 64, 6) == [2, 4, 8, 16, 32, 64]
    assert Linear().levels(COST, "decode", 64, 4) == [16, 32, 48, 64]
    rows = PaddingAware().levels(COST, "decode", 2048, 3)
    assert rows[-1] == 2048
    # Rows are free until the weights are no longer what a step waits for.
    assert rows[0] > 128
    assert all(len(set(grid.levels(COST, "shared", 1, 5))) == 1 for grid in (Exponential(), Linear()))


def test_what_no_step_can_reach_is_left_out() -> None:
    within = Limits(256, 8, 2048, 128, 100, contiguous=False)
    possible, impossible = ForwardShape("-su", 8, 60, 39), ForwardShape("--u", 30, 0, 99)
    covered = ForwardShape("--u", 8, 0, 99)
    kept = without_unreachable([possible, impossible, covered], within, COST)
    assert set(kept) == {possible, covered, within.maximum.forward}


def test_strategies_that_need_more_say_so() -> None:
    with pytest.raises(ValueError, match="needs the path"):
        build_buckets("file", BucketRequest(LIMITS, COST))
    with pytest.raises(ValueError, match="needs the steps"):
        build_buckets("trace", BucketRequest(LIMITS, COST))
    with pytest.raises(ValueError, match="exponential, linear"):
        build_buckets("nonsense", BucketRequest(LIMITS, COST))
    for strategy in blind_strategies():
        with pytest.raises(ValueError, match="max_graphs is 1"):
            build_buckets(strategy, BucketRequest(LIMITS, COST, 1))


def test_trace_fits_the_steps() -> None:
    step = Bucket("--u", 3, 0, 7, 3)
    buckets = STRATEGIES.get("trace")().choose(BucketRequest(LIMITS, COST, 8, steps=Steps.from_buckets([step] * 50)))
    assert buckets.num_graphs <= 8
    assert COST.step(buckets.lookup(step)) <= 1.02 * COST.step(step)


@pytest.fixture
def bucket_file(tmp_path: Path) -> Path:
    path = tmp_path / "buckets.yaml"
    write_bucket_file(path, build_buckets("linear", BucketRequest(LIMITS, COST, 40)), {"log": "phases.jsonl"})
    return path


def test_a_file_gives_back_what_was_written(bucket_file: Path) -> None:
    buckets = build_buckets("file", BucketRequest(LIMITS, COST, path=bucket_file))
    written = build_buckets("linear", BucketRequest(LIMITS, COST, 40))
    assert (buckets.forward, buckets.logits) == (written.forward, written.logits)


@pytest.mark.parametrize("blocks", [2, 60, 5000])
def test_another_size_of_cache_is_no_other_server(bucket_file: Path, blocks: int) -> None:
    """The number of blocks is measured at every start: shapes are cut to it, and the maximum is added."""
    within = Limits(256, 16, 2048, 128, blocks)
    buckets = build_buckets("file", BucketRequest(within, COST, path=bucket_file))
    assert dominates(buckets.lookup(within.maximum), within.maximum)
    assert_all_reachable(buckets)


@pytest.mark.parametrize("blocks", [119, 120, 121, 5000])
def test_a_file_of_as_many_graphs_as_are_allowed_stays_usable(bucket_file: Path, blocks: int) -> None:
    """A start that measures a block more must not fail: the largest bucket grows with the cache."""
    allowed = build_buckets("file", BucketRequest(LIMITS, COST, path=bucket_file)).num_graphs
    within = Limits(256, 16, 2048, 128, blocks)
    buckets = build_buckets("file", BucketRequest(within, COST, allowed, path=bucket_file))
    assert buckets.num_graphs == allowed
    assert buckets.forward[-1] == within.maximum.forward


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_num_seqs: 16", "max_num_seqs: 8", "made for max_num_seqs 8, the server has 16"),
        ("block_size: 128", "block_size: 16", "made for block_size 16, the server has 128"),
        ("gaudi-ucm.buckets/1", "gaudi-ucm.buckets/9", "is this a bucket file"),
        ("made_for", "made_fro", "unknown key 'made_fro'"),
        ("max_model_len: 2048", "max_model_len: long", "limits.max_model_len: found 'long'"),
        ("max_model_len: 2048", "length: 2048", "expected a mapping with max_num_batched_tokens"),
        ('["csu", 256,', '["csu", 257,', "exceeds the file's own limits"),
        ('["csu", 256,', '["cs-", 256,', "the phase 'csu'"),
        ("119, 120]", "119, 120, 1]", "exceeds the file's own limits [256, 119, 120]"),
        ("119, 120]", "119, 120, 0, 0]", "expected max_prompt_tiles of at least one tile"),
        ('["csu", 256,', '["csu",', "expected [phase, query_len, shared_blocks, unique_blocks]"),
        ("logits: [", "logits: [-4, ", "logits: found -4"),
        ("forward:", "forward: []\nx:", "unknown key 'x'"),
        ("schema", "{", "not YAML"),
        ("schema", "[" * 20_000 + "schema", "not YAML: nested too deeply"),
        ("num_blocks: 120", "num_blocks: " + "9" * 5000, "not YAML: Exceeds the limit"),
        ("num_blocks: 120", "num_blocks: " + "9" * 30, "limits.num_blocks: found 9999"),
        ("119, 120]", "119, " + "9" * 30 + "]", "expected [phase, query_len, shared_blocks, unique_blocks]"),
        ("logits: [", "logits: [" + "9" * 30 + ", ", "expected a number of rows"),
        ("made_for:", "made_for: &all", "expected no anchors and aliases"),
        ("schema", "x" * (5 << 20) + ": 1\nschema", "more than 4 MiB"),
    ],
)
def test_a_bad_file_is_one_clear_error(bucket_file: Path, old: str, new: str, message: str) -> None:
    text = bucket_file.read_text()
    assert old in text
    bucket_file.write_text(text.replace(old, new))
    with pytest.raises(BucketFileError) as caught:
        build_buckets("file", BucketRequest(LIMITS, COST, path=bucket_file))
    assert message in str(caught.value)
    assert str(bucket_file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_file_of_aliases_of_aliases(tmp_path: Path) -> None:
    path, lines = tmp_path / "bomb.yaml", ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path.write_text("\n".join(lines))
    with pytest.raises(BucketFileError, match=r"bomb.yaml: not YAML: .*no anchors and aliases"):
        build_buckets("file", BucketRequest(LIMITS, COST, path=path))


def test_a_file_of_a_sparse_server(tmp_path: Path, bucket_file: Path) -> None:
    """The fifth size is written where it is not 0; a server without a sparse method cuts it."""
    path, within = tmp_path / "sparse.yaml", replace(LIMITS, max_selected_blocks=40)
    written = build_buckets("padding_aware", BucketRequest(within, COST, 40))
    write_bucket_file(path, written, {})
    assert "selected" not in bucket_file.read_text()
    found = build_buckets("file", BucketRequest(within, COST, path=path))
    assert (found.forward, found.logits) == (written.forward, written.logits)
    smaller = build_buckets("file", BucketRequest(replace(within, max_selected_blocks=7), COST, path=path))
    assert smaller.selected[-1] == 7
    dense = build_buckets("file", BucketRequest(LIMITS, COST, path=path))
    assert dense.selected == (0,)
    with pytest.raises(BucketFileError, match="made for a server without a sparse method, this one selects up to 40"):
        build_buckets("file", BucketRequest(within, COST, path=bucket_file))


def test_a_file_of_a_server_whose_buckets_bound_prompt_tiles(tmp_path: Path, bucket_file: Path) -> None:
    """The last size is written where it is a bound; elsewhere shapes that differ in nothing else become one."""
    path, within = tmp_path / "reach.yaml", Limits(2048, 16, 2048, 128, 120, bounds_prompt_tiles=True)
    prompts = ForwardShape("c--", 2048, 0, 0)
    shapes = [prompts.with_prompt_tiles(2), prompts, ForwardShape("c--", 600, 0, 0)]
    written = BucketSet(shapes, [16], within, COST)
    write_bucket_file(path, written, {})
    assert '["c--", 2048, 0, 0, 0, 2]' in path.read_text()
    assert "reach" not in bucket_file.read_text()
    found = build_buckets("file", BucketRequest(within, COST, path=path))
    assert found.forward == written.forward
    path.write_text(path.read_text().replace("bounds_prompt_tiles:", "causal_reach:"))
    with pytest.warns(FutureWarning, match=r"limits\.causal_reach bounds_prompt_tiles now"):
        assert build_buckets("file", BucketRequest(within, COST, path=path)).forward == written.forward
    path.write_text(path.read_text().replace("causal_reach:", "bounds_prompt_tiles:"))
    elsewhere = build_buckets("file", BucketRequest(replace(within, bounds_prompt_tiles=False), COST, path=path))
    assert set(elsewhere.forward) == set(written.forward) - {shapes[0]}
    path.write_text(path.read_text().replace("0, 2]", "0, 8]"))
    again = build_buckets("file", BucketRequest(within, COST, path=path))
    assert prompts in again.forward, "the tiles of all rows are no bound"
    path.write_text(path.read_text().replace("0, 8]", "0, 0]"))
    with pytest.raises(BucketFileError, match="expected max_prompt_tiles of at least one tile"):
        build_buckets("file", BucketRequest(within, COST, path=path))


def test_a_file_with_too_many_graphs_or_no_file(bucket_file: Path, tmp_path: Path) -> None:
    with pytest.raises(BucketFileError, match="at most 10 are allowed"):
        build_buckets("file", BucketRequest(LIMITS, COST, 10, path=bucket_file))
    with pytest.raises(BucketFileError, match="cannot be read"):
        build_buckets("file", BucketRequest(LIMITS, COST, path=tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(BucketFileError, match="found schema 'list'"):
        build_buckets("file", BucketRequest(LIMITS, COST, path=tmp_path / "list.yaml"))


def test_a_strategy_from_outside() -> None:
    """Its name can stand in the configuration, and errors name it."""
    with STRATEGIES.scope():
        STRATEGIES.register("mine", "vllm_gaudi_ucm.graphs.strategies.grid:Linear")
        assert resolve_value({"graphs": {"strategy": "mine"}}).graphs.strategy == "mine"
        with pytest.raises(UcmConfigError, match='"mine"'):
            resolve_value({"graphs": {"strategy": "min"}})
        ours = build_buckets("mine", BucketRequest(LIMITS, COST, 16))
    assert sorted(ours.forward) == sorted(build_buckets("linear", BucketRequest(LIMITS, COST, 16)).forward)
    with pytest.raises(UcmConfigError, match="strategy"):
        resolve_value({"graphs": {"strategy": "mine"}})


OUTSIDE = "tests.graphs.outside_strategy:Powers"


def test_a_strategy_from_outside_brings_an_option_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Configured, chosen by `plan` and by a server's warm-up, shown by the doctor and in the table of options."""
    with STRATEGIES.scope():
        STRATEGIES.register("powers", OUTSIDE)
        options = {"graphs": {"strategy": "powers", "strategy_options": {"base": 4}}}
        config = resolve_value(options)
        assert resolve_value(config.to_dict()) == config != resolve_value({"graphs": {"strategy": "powers"}})
        assert config.to_dict()["graphs"]["strategy_options"] == {"base": 4}
        row = next(row for row in describe() if row.key == "ucm.graphs.strategy_options.base")
        assert row[1:] == ("integer, at least 2", "2", "Factor between two sizes.")
        check = next(check for check in static_shape_checks(config, None) if check.name == "ucm.graphs.strategy")
        assert check.found == "'powers': powers base=4, at most 64 graphs"
        for wrong, found in (({"base": 1}, "base: found 1, expected integer, at least 2"), ({"bas": 4}, "base .*near")):
            with pytest.raises(UcmConfigError, match=rf"ucm\.graphs\.strategy_options\..*{found}"):
                resolve_value({"graphs": {"strategy": "powers", "strategy_options": wrong}})

        argv = ["plan", "--strategy", "powers", "--strategy-options", '{"base": 4}', "--device", "cpu", "--json"]
        argv += ["--num-blocks", "64", "--max-num-seqs", "16", "--max-num-batched-tokens", "300"]
        main(argv)
        planned = json.loads(capsys.readouterr().out)
        assert planned["strategy"] == "powers"
        assert {4, 16} >= set(planned["logits"]) - {1} > set()
        assert "powers" in blind_strategies()

        served = build_buckets("powers", BucketRequest(LIMITS, COST, 40), config.graphs.strategy_options.model_dump())
    ready = ReadyBuckets(served)
    while (key := ready.next_cold()) is not None:
        ready.mark_warm(key)
    assert {size for size in served.logits if size < LIMITS.max_num_seqs} <= {4**power for power in range(10)}
    assert look_up(ready, LIMITS.maximum) == LIMITS.maximum


def test_the_guide_shows_it(tmp_path: Path) -> None:
    """The code of docs/guides/buckets.md runs, and makes the same sizes."""
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "buckets.md").read_text(encoding="utf-8")
    code = guide.split("### A strategy of your own")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "powers.py").write_text(code)
    shown = run_path(str(tmp_path / "powers.py"))["Powers"](base=4)
    for maximum, n in ((1, 1), (64, 1), (64, 4), (2048, 12)):
        assert shown.levels(COST, "decode", maximum, n) == Powers(4).levels(COST, "decode", maximum, n)


def test_a_strategy_without_options_takes_none() -> None:
    with pytest.raises(UcmConfigError, match=r"strategy_options: found .*, expected none: the strategy 'linear' has"):
        resolve_value({"graphs": {"strategy": "linear", "strategy_options": {"base": 4}}})
    assert main(["plan", "--strategy", "linear", "--strategy-options", "{"]) == 2


@pytest.mark.parametrize("max_graphs", [2, 5, 24])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("strategy", blind_strategies())
def test_all_graphs_of_an_encoder_are_for_rows_of_prompts(strategy: str, contiguous: bool, max_graphs: int) -> None:
    within = Limits(8192, 64, 512, 128, 1, contiguous=contiguous)
    buckets = build_buckets(strategy, BucketRequest(within, COST, max_graphs))
    assert {shape.phase for shape in buckets.forward} == {"c--"}
    assert len(buckets.logits) == 1
    # one for logits, and at most 12 sizes along an axis
    assert len(buckets.forward) == min(max_graphs - 1, 12)
    assert_all_reachable(buckets)
    assert buckets.lookup(Bucket("c--", 1, 0, 0, 1)).query_len == buckets.forward[0].query_len
