"""The replica of vllm-gaudi's bucketing: the worked examples that were run on the real one, and properties."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.vllm_gaudi.plain_replica import PlainServer
from tests.vllm_gaudi.servers import CONTIGUOUS, TRAFFICS, server, traffic
from vllm_gaudi_ucm_tools.vllm_gaudi.bucket_file import parse_bucket_file, write_bucket_file
from vllm_gaudi_ucm_tools.vllm_gaudi.look_up import LookUp, fallback_value
from vllm_gaudi_ucm_tools.vllm_gaudi.replay import replay
from vllm_gaudi_ucm_tools.vllm_gaudi.settings import Settings, SettingsError
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import prepare, prepare_from_file
from vllm_gaudi_ucm_tools.vllm_gaudi.value_ranges import exponential, linear, padding_aware

SMALL = server(2048, 32, 4096, 1000)
ENTRIES = "(1,[256,512],[0,4])\n(4,1,[64,2000])\n(8,1,4)\n(1,4096,0)\n(1,300,5)\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "buckets.txt"
    path.write_text(text)
    return path


@pytest.fixture
def example(tmp_path: Path) -> LookUp:
    return LookUp(prepare_from_file(parse_bucket_file(written(tmp_path, ENTRIES)), SMALL), SMALL)


def test_entries_of_a_file_are_filtered_and_corrected(tmp_path: Path) -> None:
    prepared = prepare_from_file(parse_bucket_file(written(tmp_path, ENTRIES)), SMALL)
    assert prepared.prompts == ((1, 256, 0), (1, 256, 4), (1, 300, 5), (1, 512, 0), (1, 512, 4))
    assert prepared.decodes == ((4, 1, 64), (4, 1, 128))
    assert prepared.omitted == ((1, 4096, 0), (8, 1, 4))


def test_look_ups_take_the_first_bucket_in_order_or_a_new_one(example: LookUp) -> None:
    assert example.decode(3, 100) == (4, 1, 128)
    assert example.decode(5, 100) == (8, 1, 128)
    assert example.decode(2, 500) == (4, 1, 128)
    assert example.prompt(1, 257, 2) == (1, 300, 5)
    assert example.prompt(1, 600, 2) == (1, 864, 32)
    assert example.prompt(2, 100, 0) == (4, 160, 0)
    assert example.added == [(8, 1, 128), (1, 864, 32), (4, 160, 0)]


def test_a_larger_context_comes_before_a_larger_query() -> None:
    prepared = prepare_from_file([(1, 256, 0), (1, 256, 64), (1, 512, 4), (1, 1, 4)], server(2048, 32, 16384, 1000))
    assert LookUp(prepared, server(2048, 32, 16384, 1000)).prompt(1, 200, 3) == (1, 256, 64)


def test_contiguous_reading_takes_blocks_of_a_larger_batch() -> None:
    settings = server(2048, 32, 4096, 1000, environment=CONTIGUOUS)
    look_up = LookUp(prepare_from_file([(1, 128, 0), (4, 1, 64), (4, 1, 200), (8, 1, 1000)], settings), settings)
    assert look_up.decode(4, 150)[0] == 4
    assert look_up.decode(4, 700)[2] == 1000


@pytest.mark.parametrize(
    ("step", "values"),
    [
        (2, {0: 0, 1: 1, 2: 4, 3: 4, 5: 8, 9: 12, 17: 18, 33: 40}),
        (32, {31: 128, 100: 160, 600: 864, 1000: 1280, 2049: 2080, 4001: 4096}),
    ],
)
def test_sizes_of_new_buckets(step: int, values: dict[int, int]) -> None:
    assert {size: fallback_value(size, step) for size in values} == values


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ((2048, 32, 4096, 1000), {"exp": (63, 40, 77), "lin": (512, 41, 90), "pad": (110, 33, 80)}),
        ((8192, 256, 40960, 7593), {"exp": (120, 100, None), "lin": (20417, 2982, None), "pad": (319, 284, None)}),
        ((8192, 21, 131072, 20000), {"exp": (144, 96, None)}),
        ((2048, 64, 32768, 5000), {"exp": (90, 82, None)}),
    ],
)
def test_numbers_of_buckets(settings: tuple[int, ...], counts: dict[str, tuple[int, int, int | None]]) -> None:
    tokens, requests, length, blocks = settings
    for strategy, (prompts, decodes, contiguous) in counts.items():
        own = {"VLLM_BUCKETING_STRATEGY": strategy}
        found = prepare(server(tokens, requests, length, blocks, environment=own))
        assert (len(found.prompts), len(found.decodes)) == (prompts, decodes), strategy
        if contiguous is not None:
            other = prepare(server(tokens, requests, length, blocks, environment=own | CONTIGUOUS))
            assert len(other.decodes) == contiguous, strategy


def test_values_of_exp() -> None:
    prepared = prepare(SMALL)
    assert sorted({query for _, query, _ in prepared.prompts}) == [128, 256, 384, 512, 768, 896, 1280, 1664, 2048]
    assert sorted({context for _, _, context in prepared.prompts}) == [0, 1, 2, 4, 8, 16, 31]
    assert sorted({batch for batch, _, _ in prepared.decodes}) == [1, 2, 4, 8, 12, 20, 32]
    top = prepare(server(8192, 256, 40960, 7593)).decodes
    # rounded down from a multiple of the requests to three times the cache
    assert max(context for _, _, context in top) == 3 * 7593


def test_values_of_each_range() -> None:
    assert exponential(128, 128, 2048, 10, False) == [128, 256, 384, 512, 640, 896, 1152, 1536, 2048]
    assert linear(2, 32, 64) == [2, 4, 8, 16, 32, 64]
    assert linear(1, 32, 100) == [1, 2, 4, 8, 16, 32, 64, 96]
    assert padding_aware(0, 8, 64, 64, 0) == [0, 1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert padding_aware(0, 8, 64, 16, 50) == [0, 1, 2, 4, 8, 16, 32, 48, 64]
    assert padding_aware(16, 16, 128, 32, 25) == [16, 32, 48, 64, 80, 96, 128]


def test_drafts_add_buckets_to_the_seeds() -> None:
    prepared = prepare_from_file([(1, 128, 0), (4, 1, 8), (4, 1, 128)], server(2048, 32, 4096, 1000, drafts=2))
    assert prepared.seeds == ((4, 1, 8), (4, 1, 128))
    assert prepared.decodes == ((4, 1, 8), (4, 1, 128), (12, 1, 24), (12, 1, 128), (12, 1, 384))


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("(1, range(256, 512, 128), 0)", [(1, 256, 0), (1, 384, 0)]),
        ("  # comment\n\n(1, 10.7, [0])  # tail", [(1, 10, 0)]),
        ("([1, 2], 1, range(3, 1, -1))", [(1, 1, 3), (1, 1, 2), (2, 1, 3), (2, 1, 2)]),
    ],
)
def test_lines_of_a_file(tmp_path: Path, text: str, entries: list[tuple[int, int, int]]) -> None:
    assert parse_bucket_file(written(tmp_path, text)) == entries


@pytest.mark.parametrize(
    "line",
    [
        "(1, 128",
        "[1, 128, 0]",
        "(1, 128)",
        "(1, 'x', 0)",
        "(1, (1, 2), 0)",
        "1",
        "(1, range(0, 9, 0), 0)",
        "(1, range(0, 10001), 0)",
        "(1, 1e999, 0)",
        "__import__('os')",
    ],
)
def test_a_line_that_ends_the_server_is_refused_with_its_place(tmp_path: Path, line: str) -> None:
    with pytest.raises(SettingsError, match="line 2"):
        parse_bucket_file(written(tmp_path, f"(1, 128, 0)\n{line}\n"))


def test_a_file_without_a_phase_is_refused() -> None:
    with pytest.raises(SettingsError, match="no decode entries"):
        prepare_from_file([(1, 128, 0)], SMALL)
    with pytest.raises(SettingsError, match="0 decode buckets"):
        prepare_from_file([(1, 128, 0), (8, 1, 4)], SMALL)


def test_a_file_that_the_server_would_change_is_not_written_silently(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="leave out or change"):
        write_bucket_file(tmp_path / "x", [(1, 128, 0), (4, 1, 64), (8, 1, 4)], SMALL, ["note"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": {"VLLM_X": "1"}}, "VLLM_X is not a variable"),
        ({"environment": {"VLLM_BUCKETING_STRATEGY": "best"}}, "expected one of exp, lin, pad"),
        ({"environment": {"VLLM_CONTIGUOUS_PA": "maybe"}}, "expected true or false"),
        ({"environment": {"VLLM_DECODE_BS_BUCKET_MAX": "-1"}}, "expected a whole number"),
        ({"environment": {"VLLM_PROMPT_BS_BUCKET_MAX": "33"}}, "expected 1 to max_num_seqs"),
        ({"hybrid_chunk": 300}, "multiple"),
        ({"drafts": -1}, "drafts is -1"),
    ],
)
def test_settings_are_checked(change: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings(**{**vars(SMALL), **change})


def test_an_empty_range_is_refused_as_the_server_does() -> None:
    sizes = {"VLLM_BUCKETING_STRATEGY": "pad", "VLLM_DECODE_BLOCK_BUCKET_MAX": "100"}
    with pytest.raises(SettingsError, match="from 128 to 100"):
        prepare(server(2048, 32, 4096, 1000, environment=sizes))


def test_look_ups_equal_a_plain_search_over_random_sets() -> None:
    rng = random.Random(0)
    for _ in range(30):
        settings = server(2048, rng.choice((4, 32, 100)), 4096, 700, prefix_caching=rng.random() < 0.5)
        sizes = [(rng.randint(1, 20), rng.choice((1, 64, 128, 700)), rng.randint(0, 200)) for _ in range(40)]
        prepared = prepare_from_file([*sizes, (1, 128, 0), (4, 1, 64)], settings)
        look_up, plain = LookUp(prepared, settings), PlainServer(prepared, settings)
        for _ in range(60):
            batch, blocks = rng.randint(1, settings.max_num_seqs), rng.randint(0, 300)
            assert look_up.decode(batch, blocks) == plain.decode(batch, blocks)
            query = rng.randint(1, 2048)
            assert look_up.prompt(1, query, blocks % 32) == plain.prompt(1, query, blocks % 32)


@pytest.mark.parametrize("name", [name for name, (own, _) in TRAFFICS.items() if own.ranks == 1 and not own.drafts])
def test_shapes_that_run_equal_a_plain_simulation(name: str) -> None:
    """With too few buckets, so that new ones are added in the order of the steps."""
    settings, found = traffic(name)
    few = prepare_from_file([(1, 300, 0), (1, 512, 6), (2, 512, 0), (4, 1, 40), (8, 1, 96)], settings)
    for prepared in (prepare(settings), few):
        plain = PlainServer(prepared, settings)
        for (step,) in found.steps:
            plain.step(step)
        outcome = replay(found.steps, prepared, settings)
        shapes: Counter[tuple[int, int, int]] = Counter()
        for ran, count in outcome.ran.items():
            shapes[ran.shape] += count
        assert shapes == plain.shapes
        assert [shape for _, shape in outcome.compiled] == plain.fresh
    assert plain.fresh, "the second set should have had too few buckets"
