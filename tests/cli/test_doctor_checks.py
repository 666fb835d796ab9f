"""The doctor's single checks, and that whatever breaks becomes a row instead of a crash."""

import argparse
import ctypes
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from vllm_gaudi_ucm import PLATFORM_CLASS, envs
from vllm_gaudi_ucm.cli.doctor import doctor, machine, plugin
from vllm_gaudi_ucm.cli.doctor.check import Check, guarded
from vllm_gaudi_ucm.cli.doctor.configuration import configuration_checks
from vllm_gaudi_ucm.config.ucm_config import UcmConfig, resolve_config
from vllm_gaudi_ucm.device.base import Memory
from vllm_gaudi_ucm.device.detect import Decision
from vllm_gaudi_ucm.device.host_limits import Cores
from vllm_gaudi_ucm.ops.cpu.native import library, matrix_unit
from vllm_gaudi_ucm.ops.cpu.packed_linear import measured_ways
from vllm_gaudi_ucm.ops.cpu.packed_linear.way import Kind, Times, Way


def test_crash_of_a_check_keeps_the_rows_before_it() -> None:
    def breaks() -> Iterator[Check]:
        yield Check("s", "first", "ok", "fine")
        raise OSError("disk")

    rows = guarded("s", breaks)
    assert [(row.name, row.status, row.found) for row in rows] == [
        ("first", "ok", "fine"),
        ("check itself", "fail", "OSError: disk"),
    ]


class FakeProbe:
    """Answers at once."""

    answers: dict[str, Any]

    def __init__(self, *question: str) -> None:
        self.question = question

    def answer(self) -> dict[str, Any]:
        return self.answers


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> type[FakeProbe]:
    """No child process: vLLM resolves our platform, detection chooses the CPU."""
    FakeProbe.answers = {"value": PLATFORM_CLASS}
    monkeypatch.setattr(plugin, "Probe", FakeProbe)
    monkeypatch.setattr(plugin, "register", lambda: PLATFORM_CLASS)
    monkeypatch.setattr(plugin, "decide", lambda: Decision("cpu", "asked for"))
    monkeypatch.setattr(doctor, "detect_device", lambda: "cpu")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv(envs.DEVICE, raising=False)
    return FakeProbe


def test_pretty_report(quick: type[FakeProbe], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(argparse.Namespace(json=False, config=None, store=None, tensor_parallel_size=1)) == 0
    out = capsys.readouterr().out
    assert all(
        word in out
        for word in (
            "Platform plugin",
            "Versions",
            "Configuration",
            "Device",
            "Static shapes",
            "null: every request is dense",
            "no problem found",
        )
    )


def test_the_verdict_comes_first_and_then_what_to_do(
    quick: type[FakeProbe], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(library, "_outcome", library._Outcome(None, "no C++ compiler"))
    asked = argparse.Namespace(json=False, config='{"cpu": {"treads": 3}}', store=None, tensor_parallel_size=1)
    assert doctor.run(asked) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("This machine cannot serve so: 1 of ")
    assert lines[0].endswith("failed, with 1 warning.")
    assert lines[2:4] == ["To do", "  fail  configuration, ucm.cpu.treads"]
    end = next(index for index, line in enumerate(lines) if line == "Platform plugin")
    to_do = " ".join(" ".join(lines[3:end]).split())
    assert "expected: ucm.cpu.threads (the nearest valid key) to do: correct it" in to_do
    assert "warn device, native kernels none: no C++ compiler" in to_do
    assert "install a C++ compiler that works" in to_do
    assert max(map(len, lines)) <= 80
    asked.config = None
    assert doctor.run(asked) == 0
    assert capsys.readouterr().out.startswith("This machine can serve, on cpu: no check failed, with 1 warning.\n")


@pytest.mark.parametrize(
    ("outcome", "status", "words"),
    [
        (library._Outcome(None, "g++ failed: no"), "warn", "install a C++ compiler"),
        (library._Outcome(ctypes.CDLL(None), "", "/root/.cache: Read-only file system"), "warn", "set XDG_CACHE_HOME"),
        (library._Outcome(ctypes.CDLL(None), "", origin="from the wheel, for amx CPUs"), "ok", ""),
    ],
)
def test_kernels_that_are_missing_or_not_kept(
    monkeypatch: pytest.MonkeyPatch, outcome: library._Outcome, status: str, words: str
) -> None:
    monkeypatch.setattr(library, "_outcome", outcome)
    (row,) = machine.kernel_checks("cpu")
    assert row.status == status
    assert words in row.advice
    assert outcome.reason + outcome.not_kept + outcome.origin in row.found
    assert not list(machine.kernel_checks("cuda"))


def test_options_that_are_not_the_defaults() -> None:
    def ucm(text: str | None) -> str:
        return next(row.found for row in configuration_checks(text) if row.name == "ucm")

    assert ucm(None).startswith("all defaults")
    assert ucm('{"cpu": {"threads": 3}}') == "cpu.threads=3"
    gsa = '{"ucm_sparse_method": "GSA", "ucm_sparse_config": {"GSA": {"sparse_ratio": 0.2}}}'
    assert ucm(gsa) == 'ucm_sparse_method="GSA", ucm_sparse_config.GSA.sparse_ratio=0.2'


def test_pretty_report_of_a_problem(quick: type[FakeProbe], capsys: pytest.CaptureFixture[str]) -> None:
    asked = argparse.Namespace(json=False, config='{"cpu": {"treads": 3}}', store=None, tensor_parallel_size=1)
    assert doctor.run(asked) == 1
    out = capsys.readouterr().out
    assert "1 of " in out
    assert "ucm.cpu.threads" in out


@pytest.mark.parametrize(
    "broken",
    [
        "PluginChecks",
        "version_checks",
        "configuration_checks",
        "device_checks",
        "static_shape_checks",
        "sparse_checks",
    ],
)
def test_no_section_can_crash_the_doctor(
    quick: type[FakeProbe], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    def crash(*args: Any) -> Any:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(doctor, broken, crash)
    assert doctor.run(argparse.Namespace(json=True, config=None, store=None, tensor_parallel_size=1)) == 1
    assert "RuntimeError: unforeseen" in capsys.readouterr().out


def test_detection_that_crashes(quick: type[FakeProbe], monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> str:
        raise ImportError("libcuda.so.1")

    monkeypatch.setattr(doctor, "detect_device", crash)
    monkeypatch.setattr(plugin, "register", crash)
    examination = doctor.examine(None)
    assert examination.device is None
    (register,) = [check for check in examination.checks if check.name == "register()"]
    assert (register.status, register.found) == ("fail", "ImportError: libcuda.so.1")


def test_inactive_plugin_is_a_warning(quick: type[FakeProbe], monkeypatch: pytest.MonkeyPatch) -> None:
    """Staying out of the way is right on such a machine, so it is no failure; the reason is shown."""
    quick.answers = {"value": "vllm.platforms.cuda.CudaPlatform"}
    monkeypatch.setattr(plugin, "register", lambda: None)
    monkeypatch.setattr(plugin, "decide", lambda: Decision(None, "vLLM has a platform of its own (cuda)"))
    rows = {check.name: check for check in plugin.PluginChecks().rows()}
    assert (rows["register()"].status, rows["platform of vLLM"].status) == ("warn", "warn")
    assert rows["register()"].found == "not active: vLLM has a platform of its own (cuda)"
    assert envs.DEVICE in rows["register()"].advice


def test_vllm_that_resolves_another_platform(quick: type[FakeProbe]) -> None:
    quick.answers = {"error": "RuntimeError: two"}
    rows = {check.name: check for check in plugin.PluginChecks().rows()}
    assert (rows["platform of vLLM"].status, rows["platform of vLLM"].found) == ("fail", "error: RuntimeError: two")


@pytest.mark.parametrize(
    ("why_not", "wanted", "found"),
    [("", True, "used for float32"), ("", False, "ucm.cpu.matrix_unit is false"), ("no AMX", True, "not used: no AMX")],
)
def test_matrix_unit(monkeypatch: pytest.MonkeyPatch, why_not: str, wanted: bool, found: str) -> None:
    monkeypatch.setattr(matrix_unit, "why_not", lambda: why_not)
    config = resolve_config({"ucm": {"cpu": {"matrix_unit": wanted}}})
    (row,) = machine.matrix_unit_checks(config, "cpu")
    assert found in row.found
    assert row.status == ("ok" if wanted and not why_not else "info")
    assert not list(machine.matrix_unit_checks(config, "cuda"))


def test_each_operation_has_a_row_with_its_implementation_and_the_others() -> None:
    rows = {row.name: row for row in machine.implementation_checks(UcmConfig(), "hpu")}
    assert set(rows) == {"unified_attention", "kv_cache", "block_selection", "mixture_of_experts"}
    assert all(row.status == "ok" for row in rows.values())
    assert rows["unified_attention"].found.startswith("hpu; cpu: it is for cpu; ")
    assert rows["kv_cache"].found.startswith("reference; native: it is for cpu")
    wrong = resolve_config({"ucm": {"attention": {"implementation": "cpu"}}})
    (row,) = (row for row in machine.implementation_checks(wrong, "hpu") if row.status == "fail")
    assert "'cpu' cannot be used here (it is for cpu, got tensors on hpu), choose 'auto' or 'hpu'" in row.found


def test_missing_entry_point(quick: type[FakeProbe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "entry_points", lambda group: [])
    found = next(plugin.PluginChecks().rows())
    assert (found.name, found.status, found.found) == ("entry point", "fail", "no such entry point")


def test_probe_that_does_not_answer() -> None:
    """A plugin that hangs costs its time limit, and is killed."""
    hanging = plugin.Probe("plugin", "sleeper", "time:sleep")
    answer = hanging.answer(timeout=30)
    assert "TypeError" in answer["error"]  # sleep() without its argument: raised, not hung
    assert plugin.Probe("plugin", "stuck", "threading:Event().wait").answer(timeout=0.01) == {
        "error": "no answer within 0 s"
    }


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.32.0+empty", "ok"), ("0.31.0", "fail"), ("0.33.0+empty", "ok"), ("0.34.0", "fail"), (None, "fail")],
)
def test_version_rows(monkeypatch: pytest.MonkeyPatch, version: str | None, status: str) -> None:
    monkeypatch.setattr(machine, "installed_version", lambda name: version if name == "vllm" else "2.13.0")
    rows = {check.name: check for check in machine.version_checks()}
    assert rows["vllm"].status == status
    assert rows["vllm"].expected == ">=0.32.0,<0.34"
    assert rows["vllm"].found == (version or "not installed")
    assert bool(rows["vllm"].advice) is (status == "fail")


def test_transformers_outside_vllms_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed_version", lambda name: "4.0.0")
    rows = {check.name: check for check in machine.version_checks()}
    assert rows["transformers"].status == "warn"
    assert "vLLM asks for it" in rows["transformers"].advice

    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "requires", missing)
    assert {check.name: check for check in machine.version_checks()}["transformers"].status == "ok"


def test_unsupported_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.9.1")
    rows = {check.name: check for check in machine.version_checks()}
    assert (rows["Python"].status, rows["Python"].found) == ("fail", "3.9.1")


class SmallDevice:
    """A device with little memory left."""

    def __init__(self, free: int) -> None:
        self.free = free

    def name(self) -> str:
        return "GAUDI9"

    def memory(self) -> Memory:
        return Memory(self.free, 8 * machine.GIB)


@pytest.mark.parametrize(("free", "status"), [(machine.GIB, "warn"), (4 * machine.GIB, "ok")])
def test_device_rows(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(machine, "get_device", lambda kind: SmallDevice(free))
    monkeypatch.setattr(machine, "gaudi_cards", lambda: [])
    rows = {check.name: check for check in machine.device_checks("hpu")}
    assert rows["device"].found == "hpu (GAUDI9)"
    assert rows["memory"].status == status
    assert "GiB free of 8.0 GiB" in rows["memory"].found
    assert rows["Gaudi cards"].status == "warn"
    monkeypatch.setattr(machine, "gaudi_cards", lambda: ["accel0"])
    assert {check.name: check for check in machine.device_checks("hpu")}["Gaudi cards"].status == "ok"


def test_ways_of_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine has measured; the matrix unit is left out where the configuration does."""
    seconds = {Way.VECTORS: (1.0,) * 8, Way.TILES: (3.0, *(0.5,) * 7), Way.ONEDNN: (2.0,) * 8}
    monkeypatch.setattr(measured_ways, "known_ways", lambda: {Kind.PAIRS: Times(Kind.PAIRS, seconds)})
    (row,) = machine.product_checks(resolve_config({}), "cpu")
    assert row.found == "bfloat16: vectors up to 1 row, matrix unit up to 128 rows, oneDNN beyond"
    (row,) = machine.product_checks(resolve_config({"ucm": {"cpu": {"matrix_unit": False}}}), "cpu")
    assert row.found == "bfloat16: vectors up to 128 rows, oneDNN beyond"
    # on a machine that other programs kept busy
    monkeypatch.setattr(measured_ways, "known_ways", lambda: {Kind.PAIRS: Times(Kind.PAIRS, {})})
    (row,) = machine.product_checks(resolve_config({}), "cpu")
    assert row.found == "bfloat16: not measured on a quiet machine yet; a rule chooses"
    monkeypatch.setattr(measured_ways, "known_ways", dict)
    (row,) = machine.product_checks(resolve_config({}), "cpu")
    assert row.found.startswith("not measured yet")
    assert not list(machine.product_checks(resolve_config({}), "cuda"))


def test_thread_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(machine, "find_cores", lambda: Cores(machine=64, affinity=8, quota=2.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    rows = {check.name: check for check in machine.thread_checks()}
    assert rows["cores"].found == "2 usable: 64 in the machine, 8 by affinity, a quota of 2"
    assert rows["threads"].status == "warn"
    assert rows["threads"].advice.startswith("set OMP_NUM_THREADS=2 or ucm.cpu.threads: 2")
    assert (rows["THP_MEM_ALLOC_ENABLE"].found, rows["THP_MEM_ALLOC_ENABLE"].advice) == ("'1'", "")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert {check.name: check for check in machine.thread_checks()}["threads"].status == "ok"


def test_configuration_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.DEVICE, "cpu")
    rows = list(configuration_checks('{"cpu": {"threads": 3}}'))
    assert [row.status for row in rows] == ["info", "info", "ok"]
    assert [row.name for row in rows[:2]] == [envs.DEVICE, envs.KERNELS]
    assert "cpu.threads=3" in rows[2].found
    bad = list(configuration_checks('{"cpu": {"threads": 0}, "fase_log": 1}'))[2:]
    assert [(row.name, row.status) for row in bad] == [("ucm.cpu.threads", "fail"), ("ucm.fase_log", "fail")]
    (malformed,) = list(configuration_checks('{"cpu": '))[2:]
    assert "malformed text (line 1, column 9" in malformed.found
