"""Writes a report: JSON, page and archive. Files that cannot be written are named, and the others are written."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm_tools.first_hour.hour import Findings, Options
from vllm_gaudi_ucm_tools.first_hour.page import page
from vllm_gaudi_ucm_tools.first_hour.privacy import Scrubber

SCHEMA = "gaudi-ucm.first-hour/1"
JSON, PAGE, ARCHIVE = "first-hour.json", "first-hour.html", "first-hour.tar.gz"
LARGEST_FILE = 64 << 20  # of a trace in the archive


def report(findings: Findings, options: Options, scrubber: Scrubber) -> dict[str, Any]:
    """Everything, as plain values without anything private."""
    verdicts = Counter(str(result.verdict) for result in findings.results)
    found: dict[str, Any] = scrubber.value(
        {
            "schema": SCHEMA,
            "device": findings.device,
            "sizes": options.sizes,
            "model": "a small random Llama" if options.model is None else "of --model",
            "interrupted": findings.interrupted,
            "machine": findings.machine,
            "verdicts": dict(verdicts),
            "results": [result.to_json() for result in findings.results],
            "files": sorted(findings.files),
        }
    )
    return found


def scrubber(options: Options, findings: Findings, output: Path) -> Scrubber:
    """The scrubber of this run: its folders have names of their own, and versions of packages are not addresses."""
    folders = {output.resolve(): "<output>"}
    if options.model is not None:
        folders[options.model.resolve()] = "<model>"
    packages = findings.machine.get("packages")
    versions = set(packages.values()) if isinstance(packages, dict) else set()
    build = findings.machine.get("build")
    return Scrubber(folders, versions | ({build} if isinstance(build, str) else set()))


def write(found: Mapping[str, Any], files: Mapping[str, Path], clean: Scrubber, output: Path) -> dict[str, str]:
    """Writes the files of a report to a folder. Returns name to "" if it was written, otherwise to the error."""
    texts = {JSON: _text(lambda: json.dumps(found, indent=2)), PAGE: _text(lambda: page(found))}
    outcome = {name: error for name, (_, error) in texts.items()}
    contents = {name: text.encode() for name, (text, error) in texts.items() if not error}
    for name, content in contents.items():
        outcome[name] = _write(output / name, content)
    for name, path in files.items():
        content_or_error = _scrubbed(path, clean)
        if isinstance(content_or_error, str):
            outcome[name] = content_or_error
        else:
            contents[name] = content_or_error
    try:
        outcome[ARCHIVE] = _write(output / ARCHIVE, archive(contents))
    except (OSError, MemoryError) as error:
        outcome[ARCHIVE] = str(error)
    return outcome


def archive(contents: Mapping[str, bytes]) -> bytes:
    """A gzipped tar file of these files, without owners, times and names of this machine."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"first-hour/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _text(make: Callable[[], str]) -> tuple[str, str]:
    try:
        return make(), ""
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"


def _write(path: Path, content: bytes) -> str:
    """Writes a file; returns "" or the error: a full disk costs one file, not the others."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        return f"{error.strerror or error}"
    return ""


def _scrubbed(path: Path, clean: Scrubber) -> bytes | str:
    """A file of a probe without anything private, or why it is left out."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            return f"left out: larger than {LARGEST_FILE >> 20} MiB"
        return clean.text(path.read_text(encoding="utf-8", errors="replace")).encode()
    except OSError as error:
        return f"{error.strerror or error}"
