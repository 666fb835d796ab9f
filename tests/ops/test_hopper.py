"""The CUDA kernels on a machine without a GPU: compiled for a Hopper."""

from __future__ import annotations

import pytest

from tests.ops.triton_process import run

pytestmark = pytest.mark.slow  # starts processes

pytest.importorskip("triton")

from tests.ops.sass import unwritten_reads  # noqa: E402  asks triton where its disassembler is

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on a Hopper; CUDA documentation, compute capability 9.0

# Of many rows, and of models that are served in bfloat16: they take long to compile.
CHOSEN_TOKENS = ("score_unique", "score_shared", "score_new", "count_digits", "count_best", "write_best")
LATENTS = ("attend_latent_spans", "attend_latent_tiles", "attend_latent_causal")
STATES = ("solve_tiles", "walk_deltas", "walk_spaces")
NOT_IN_FLOAT32 = ("write_out", "attend_windows", *LATENTS, *CHOSEN_TOKENS, *STATES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_compile_for_a_hopper(dtype: str) -> None:
    """Every kernel of a step with all parts, heads of 128: no GPU is needed to see that it compiles and fits."""
    lines = run(["-m", "tests.ops.compile_for_hopper", dtype], TRITON_INTERPRET="0").splitlines()
    found = {name: int(shared) for name, shared in (line.split() for line in lines)}
    assert set(found) == {
        "list_columns",
        "find_bounds",
        "repair_causal",
        "attend_rows",
        "attend_spans",
        "attend_shared",
        "divide_columns",
        "list_own",
        "place_own",
        "attend_own",
        "attend_causal",
        "merge_parts",
        "summarise_blocks",
        "estimate_blocks",
        "divide_queries",
        "encode_blocks",
        "estimate_codes",
        "estimate_boxes",
        "span_sums",
        "block_shares",
        "rank_candidates",
        "stream_boxes",
        "share_blocks",
        "rank_and_take",
        "take_choices",
        "keep_or_replace_spans",
        "write_rows",
        "copy_pairs",
        "norm_rows",
        "rotate_heads",
        "gate_rows",
        "draw_rows",
        "accept_rows",
        "find_candidates",
        "multiply_codes",
        "round_rows",
        "multiply_int8",
        "add_sums",
        "group_rows",
        "narrow_rows",
        "widen_rows",
        "group_pairs",
        "multiply_gated",
        "multiply_shared",
        "multiply_gated_codes",
        "multiply_shared_codes",
        "sum_pairs",
        "add_parts",
        "choose",
        "update_deltas",
        "update_spaces",
        "open_gates",
        "take_time_steps",
        "norm_gated_rows",
        "convolve_rows",
        *(NOT_IN_FLOAT32 if dtype == "bfloat16" else []),
    }
    assert max(found.values()) <= SHARED_MEMORY


def test_reads_of_registers_that_nothing_has_written_are_seen() -> None:
    """A division that the kernel calls stands behind it; what it leaves has been written, and nothing else has."""
    calls = [
        ("0400", "MOV", "R4, 0x420"),
        ("0410", "CALL.REL.NOINC", "0x440"),
        ("0420", "UMOV", "UR11, UR8"),
        ("0430", "UIADD3", "UR12, UR11, UR9, URZ"),
        ("0440", "UIMAD.WIDE.U32", "UR8, UR11, 0x2, URZ"),
        ("0450", "RET.REL.NODEC", "R4 0x0"),
        ("0460", "UMOV", "UR20, 0x1"),
    ]
    assert unwritten_reads(calls) == []
    assert unwritten_reads([*calls[:1], *calls[2:]]) == ["0020: UMOV UR11, UR8", "0030: UIADD3 UR12, UR11, UR9, URZ"]
    # behind the return of what is called, UR20 is written by nothing that has run
    before = ("0400", "UIADD3", "UR4, UR20, 0x1, URZ")
    assert unwritten_reads([before, *calls[1:]]) == ["0000: UIADD3 UR4, UR20, 0x1, URZ"]


def test_an_election_writes_the_number_of_a_thread() -> None:
    assert unwritten_reads([("0400", "ELECT", "P0, UR62, PT"), ("0410", "MOV", "R24, UR62")]) == []
