"""Nothing private is in what is sent: planted values are searched for in every byte of the archive."""

from __future__ import annotations

import gzip
import json
import socket
import tarfile
from pathlib import Path

import pytest

from vllm_gaudi_ucm import envs
from vllm_gaudi_ucm_tools.first_hour import privacy
from vllm_gaudi_ucm_tools.first_hour.catalogue import BY_NUMBER
from vllm_gaudi_ucm_tools.first_hour.hour import Findings, Options
from vllm_gaudi_ucm_tools.first_hour.outputs import ARCHIVE, JSON, PAGE, report, scrubber, write
from vllm_gaudi_ucm_tools.first_hour.privacy import Scrubber
from vllm_gaudi_ucm_tools.first_hour.probe import Unit
from vllm_gaudi_ucm_tools.first_hour.result import Ending, judge

PLANTED = {
    "host": "node17.customer.example",
    "short host": "node17",
    "user": "jane_doe",
    "home": "/srv/people/jane",
    "other home": "/home/bob",
    "v4": "10.23.45.67",
    "v6": "fe80::1ff:fe23:4567:890a",
    "hardware": "a4:bf:01:5e:22:9c",
    "identity": "123e4567-e89b-12d3-a456-426614174000",
    "secret": "hunter2hunter2",
    "mail": "jane@customer.example",
    "other variable": "a-private-project",
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    """The values are this machine's, and a text has all of them."""
    monkeypatch.setattr(socket, "gethostname", lambda: PLANTED["host"])
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: PLANTED["user"])
    monkeypatch.setenv("HOME", PLANTED["home"])
    monkeypatch.setenv("HF_TOKEN", PLANTED["secret"])
    monkeypatch.setenv("PT_HPU_API_KEY", PLANTED["secret"] + "2")
    monkeypatch.setenv("PROJECT_NAME", PLANTED["other variable"])
    monkeypatch.setenv("PT_HPU_RECIPE_CACHE_CONFIG", f"{PLANTED['home']}/recipes,false,1024")
    monkeypatch.setenv("HCCL_SOCKET_ADDRESS", PLANTED["v4"])
    return " | ".join(value for name, value in PLANTED.items() if name != "other variable")


def test_nothing_of_it_is_in_the_archive(planted: str, tmp_path: Path) -> None:
    events = [
        {"kind": "claim", "name": planted, "found": planted, "expected": planted, "ok": False},
        {"kind": "note", "name": "n", "value": {planted: [planted, {"deep": planted}]}},
        {"kind": "series", "name": planted, "x": planted, "y": planted, "points": [[1.0, 2.0], [3.0, 4.0]]},
        {"kind": "end", "status": "error", "text": planted},
    ]
    findings = Findings("hpu", {"tools": {"hl-smi": planted}, "environment": envs.reportable(), "failure": planted})
    findings.add(judge(Unit(BY_NUMBER[3], "compile"), Ending(0, events, planted, 1.0)))
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [planted]}))
    findings.files["trace.json"] = trace
    model = tmp_path / "secret-model"
    options = Options([BY_NUMBER[3]], model=model)
    output = tmp_path / "out"
    clean = scrubber(options, findings, output)
    found = report(findings, options, clean)
    assert not any(write(found, findings.files, clean, output).values())
    whole = gzip.decompress((output / ARCHIVE).read_bytes()) + (output / PAGE).read_bytes()
    assert b"trace.json" in whole
    assert b"PT_HPU_RECIPE_CACHE_CONFIG" in whole
    assert b"HCCL_SOCKET_ADDRESS" in whole
    assert b"PT_HPU_API_KEY" not in whole
    for name, value in PLANTED.items():
        assert value.encode() not in whole, name
    assert str(tmp_path).encode() not in whole


def test_the_archive_has_no_owner_and_no_time(tmp_path: Path) -> None:
    findings = Findings("cpu", {})
    clean = Scrubber()
    write(report(findings, Options([]), clean), {}, clean, tmp_path)
    assert (tmp_path / ARCHIVE).read_bytes()[3:8] == bytes(5), "no name and no time in the header of gzip"
    with tarfile.open(tmp_path / ARCHIVE) as tar:
        assert sorted(tar.getnames()) == [f"first-hour/{name}" for name in sorted((JSON, PAGE))]
        for entry in tar:
            assert (entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) == (0, 0, "", "", 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at 192.168.1.9:8000 it", "at <ip address>:8000 it"),
        ("version 1.24.1.482 of", "version 1.24.1.482 of"),
        ("1.24.1.200", "1.24.1.200"),
        ("12:34:56 GiB", "12:34:56 GiB"),
        ("std::vector<int>", "std::vector<int>"),
        ("torch::autograd::Node", "torch::autograd::Node"),
        ("to [2001:db8::17]:80", "to [<ip address>]:80"),
        ("/home/anna/x.py", "<home>/x.py"),
        ("https://anna:pw@proxy/x", "https://<user>@proxy/x"),
        ("2.11.0a0+gitabc", "2.11.0a0+gitabc"),
    ],
)
def test_texts(text: str, expected: str) -> None:
    assert Scrubber(versions=["1.24.1.200"]).text(text) == expected


def test_names_that_say_nothing_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gaudi")
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: "root")
    assert Scrubber().text("gaudi-ucm on gaudi as root") == "gaudi-ucm on gaudi as root"


def test_a_user_without_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise OSError("no username set in the environment")

    monkeypatch.setattr(privacy.getpass, "getuser", unknown)
    assert Scrubber().text("x") == "x"


def test_only_allowed_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PT_HPU_MAX", "1")
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0")
    monkeypatch.setenv("AWS_REGION", "x")
    monkeypatch.setenv("HABANA_SECRET_THING", "y")
    found = envs.reportable()
    assert {"PT_HPU_MAX", "HABANA_VISIBLE_MODULES"} <= found.keys()
    assert not {"AWS_REGION", "HABANA_SECRET_THING"} & found.keys()
