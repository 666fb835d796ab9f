"""Each probe runs on the simulated card, in the mode that a server takes; and each names the fault that is planted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.first_hour.forks import forked_probe
from tests.first_hour.hours import ON_CARD, ROOT
from tests.first_hour.several import One, Together
from tests.sim_path import software_path
from vllm_gaudi_ucm.device.gaudi_software import RELEASES, minor_version
from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER
from vllm_gaudi_ucm_tools.first_hour.hour import ALWAYS, LAZY_MODE
from vllm_gaudi_ucm_tools.first_hour.launcher import run_apart
from vllm_gaudi_ucm_tools.first_hour.probe import Mode, Probe, Unit
from vllm_gaudi_ucm_tools.first_hour.probes.cache import disk_cache
from vllm_gaudi_ucm_tools.first_hour.probes.cards import between_two
from vllm_gaudi_ucm_tools.first_hour.probes.software import input_reuse
from vllm_gaudi_ucm_tools.first_hour.result import Result, Verdict, judge

LIMIT_S = 240.0
ENDED = (Verdict.AS_EXPECTED, Verdict.ANSWERED, Verdict.DOES_NOT_APPLY)
SERVES = {24, 27, 28, 29}
TWO_CARDS = 21
# They start processes, or compile for long: the simulator runs every operator of a layer in Python.
SLOW = {8, 16, 17, 20, 21, 25, 26, 30, 31} | SERVES
START_PROCESSES = {20, 21, 30, 31}
QUICK_CASES = 4
COMPILED = {5, 6, 10, 12}  # beside those that are compiled alone
FAULTY_CARD = One(1, "", "unknown_generation")
WRONG_ATTENTION = One(27, "", "wrong_attention")
# fault, probe, mode, words of a claim
FAULTS_NAMED: list[tuple[str, int, Mode, str]] = [
    ("unknown_generation", 1, "stock", "generation: GAUDI9, expected GAUDI2 or GAUDI3"),
    ("compiles_each_call", 3, "compile", "compilations while two alternate: 1, expected 0"),
    ("drops_writes", 5, "eager", "K of 1024 tokens: dropped, 0 rows written, expected kept"),
    ("wrong_merge", 9, "eager", "our partials, halves merged: relative error"),
    ("wrong_where", 10, "eager", "integer patterns: where(mask, a, b) torch.int32 [7]: wrong values"),
    ("repeats_random_numbers", 12, "eager", "rand, two calls: are equal, expected differ"),
    ("refuses_wide_products", 19, "eager", "refused: RuntimeError: out has another dtype, expected allowed"),
    ("unordered_topk", 23, "eager", "topk 1: wrong, expected right"),
    ("wrong_attention", 25, "eager", "prompts, float32 (c--): error"),
]


def probe(
    number: int, mode: Mode, folder: Path, case: str = "", fault: str = "", limit_s: float = LIMIT_S, **env: str
) -> Result:
    """One process of a probe, as the command starts it, with a fault where one is named."""
    found = BY_NUMBER[number]
    bench = {"kind": "hpu", "mode": mode, "case": case, "sizes": "small", "model": "", "folder": str(folder)}
    request: dict[str, Any] = {"function": found.function, "bench": {**bench, "minutes": 0.02}, "limit_s": limit_s}
    path = f"{ROOT / 'tests/first_hour/planted'}:{ROOT}:{ON_CARD['PYTHONPATH']}"
    changes: dict[str, str | None] = {**ALWAYS, **ON_CARD, "PYTHONPATH": path, "PLANTED_FAULT": fault, **env}
    changes["PT_HPU_LAZY_MODE"] = LAZY_MODE[mode]
    changes["PT_HPU_USE_EAGER_FALLBACK"] = None if found.falls_back else "0"
    return judge(Unit(found, mode, case), run_apart(request, changes, limit_s))


def said(result: Result) -> str:
    """For a failure."""
    return f"{result.verdict}: {result.found}\n{result.data.get('log')}"


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    """All quick probes and faults, a process for each mode."""
    units: dict[Mode, list[One]] = {"stock": [One(1), FAULTY_CARD]}
    for number in sorted(set(BY_NUMBER) - SLOW):
        one = BY_NUMBER[number]
        if number != 1:
            mode = _quick_mode(number)
            units.setdefault(mode, []).extend(One(number, case) for case in one.cases[:QUICK_CASES])
    for fault, number, mode, _ in FAULTS_NAMED:
        if mode != "stock":
            units[mode].append(One(number, "", fault))
    units["eager"].append(One(TWO_CARDS))
    found = Together(units, tmp_path_factory.mktemp("together"))
    yield found
    found.close()


@pytest.mark.parametrize("number", sorted(set(BY_NUMBER) - SLOW))
def test_on_the_simulated_card(number: int, together: Together) -> None:
    """A torch that comes with no release of Gaudi's software is said, and nothing else differs."""
    one = BY_NUMBER[number]
    mode = _quick_mode(number)
    if number == 1 and minor_version(version("torch")) not in RELEASES.values():
        result = together[mode, One(number)]
        assert result.verdict is Verdict.DIFFERS, said(result)
        assert result.found.startswith("torch of the software: "), said(result)
        return
    for case in one.cases[:QUICK_CASES]:
        _check(together[mode, One(number, case)], one)


def test_what_is_known_of_writes_through_aliases(together: Together) -> None:
    """And what nobody knows, where the simulated card does the worst."""
    answers = [together["compile", One(6, case)].data["answer"][0]["text"] for case in BY_NUMBER[6].cases]
    assert answers == ["kept", "kept", "dropped"]


def test_one_card_where_two_are_needed(together: Together) -> None:
    """Only its process can tell."""
    result = together["eager", One(TWO_CARDS)]
    assert result.verdict is Verdict.DOES_NOT_APPLY, said(result)
    assert result.found == "1 card is visible, two are needed"


@pytest.fixture(scope="module")
def slow_ones(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    """Those that compile for long."""
    units: dict[Mode, Sequence[One]] = {"compile": [One(number) for number in sorted(SLOW - SERVES - START_PROCESSES)]}
    found = Together(units, tmp_path_factory.mktemp("slow"))
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(SLOW - SERVES - START_PROCESSES))
def test_slow_ones_on_the_simulated_card(number: int, slow_ones: Together) -> None:
    _check(slow_ones["compile", One(number)], BY_NUMBER[number], applies=True)


@pytest.mark.slow
def test_recipes_on_disk(tmp_path: Path) -> None:
    """Without a fault, and where the disk keeps nothing."""
    for name in ("right", "lost"):
        (tmp_path / name).mkdir()
    _check(forked_probe(20, "compile", disk_cache, tmp_path / "right"), BY_NUMBER[20], applies=True)
    lost = forked_probe(20, "compile", disk_cache, tmp_path / "lost", "loses_recipes")
    assert lost.verdict is Verdict.DIFFERS
    assert "compilations of the second start: 4, expected 0" in _claims(lost), said(lost)


@pytest.mark.slow
def test_input_reuse(tmp_path: Path) -> None:
    """Of Gaudi software 1.24.2: without a fault, and where writes are lost."""
    for name in ("right", "lost"):
        (tmp_path / name).mkdir()
    found = forked_probe(30, "compile", input_reuse, tmp_path / "right")
    _check(found, BY_NUMBER[30], applies=True)
    assert [one["text"] for one in found.data["answer"]] == ["right", "right"]
    lost = forked_probe(30, "compile", input_reuse, tmp_path / "lost", "drops_writes")
    assert lost.verdict is Verdict.DIFFERS
    assert "step 1: wrong cache" in _claims(lost), said(lost)


@pytest.mark.slow
def test_emptying_the_host_cache(tmp_path: Path) -> None:
    """In a process of its own: it ends with an error on the simulated card, and the probe says so."""
    found = probe(31, "eager", tmp_path, PYTHONPATH=f"{ROOT}:{software_path('1.24.2')}")
    assert found.verdict is Verdict.ANSWERED, said(found)
    answer = found.data["answer"][0]["text"]
    assert "raised" in answer, answer
    assert "ended with status 1" in answer, answer


@pytest.mark.slow
def test_two_cards(tmp_path: Path) -> None:
    """In processes as the command starts them, which start others; and with a fault of the collectives."""
    _check(probe(TWO_CARDS, "compile", tmp_path, fault="two_cards"), BY_NUMBER[TWO_CARDS], applies=True)
    wrong = forked_probe(TWO_CARDS, "eager", between_two, tmp_path, "wrong_sums")
    assert "all_reduce torch.float32: 3.0, expected 7" in _claims(wrong), said(wrong)


def _quick_mode(number: int) -> Mode:
    modes = BY_NUMBER[number].modes
    return "compile" if number in COMPILED or ("eager" not in modes and "compile" in modes) else modes[0]


def _check(result: Result, one: Probe, applies: bool = False) -> None:
    """It ended, everything is as known, and it says something where it has a question."""
    assert result.verdict in ENDED, said(result)
    assert not (applies and result.verdict is Verdict.DOES_NOT_APPLY)
    if one.questions and result.verdict is not Verdict.DOES_NOT_APPLY:
        assert result.data["answer"], "it has a question, and says nothing"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    """Those that serve. 29 is in `test_command`."""
    units: dict[Mode, Sequence[One]] = {"compile": [*map(One, sorted(SERVES - {29})), WRONG_ATTENTION]}
    found = Together(units, tmp_path_factory.mktemp("served"))
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(SERVES - {29}))
def test_serving_on_the_simulated_card(number: int, served: Together) -> None:
    result = served["compile", One(number)]
    assert result.verdict in (Verdict.AS_EXPECTED, Verdict.ANSWERED), said(result)


@pytest.mark.parametrize(("fault", "number", "mode", "words"), FAULTS_NAMED)
def test_a_planted_fault_is_named(fault: str, number: int, mode: Mode, words: str, together: Together) -> None:
    result = together[mode, One(number, "", fault)]
    assert result.verdict is Verdict.DIFFERS, said(result)
    assert words in _claims(result)


def test_a_fault_before_the_bridge_is_named(tmp_path: Path) -> None:
    copies = probe(14, "eager", tmp_path, fault="corrupts_copies")
    assert "64 KiB unpinned, waiting: corrupted, expected right" in _claims(copies), said(copies)


def _claims(result: Result) -> str:
    return "; ".join(f"{one['name']}: {one['found']}, expected {one['expected']}" for one in result.data["claim"])


@pytest.mark.slow
def test_wrong_attention_is_seen_in_tokens(served: Together) -> None:
    """The whole engine, which has nothing to compare with but the reference on the host."""
    result = served["compile", WRONG_ATTENTION]
    assert result.verdict is Verdict.DIFFERS, said(result)
    assert "logit of a token below the best" in result.found


def test_a_crash_and_a_hang(tmp_path: Path) -> None:
    crashed = probe(2, "eager", tmp_path, fault="segfault")
    assert crashed.verdict is Verdict.FAILED
    assert crashed.found == "the process was ended by SIGSEGV"
    hung = probe(2, "eager", tmp_path, fault="hang", limit_s=2)
    assert hung.verdict is Verdict.TIMED_OUT


def test_a_missing_package(tmp_path: Path) -> None:
    """Without the bridge every probe of a Gaudi fails with a sentence, and none with a traceback alone."""
    result = probe(1, "stock", tmp_path, PYTHONPATH=str(ROOT))
    assert result.verdict is Verdict.FAILED
    assert result.found.startswith("ModuleNotFoundError: No module named 'habana_frameworks'")
