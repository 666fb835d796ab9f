"""The phase log: one JSON line per step (`ucm.phase_log`), and running totals by phase that are always kept.

The line format is described in docs/guides/metrics.md; `PhaseLogReader` is its only reader.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_gaudi_ucm.graphs.shapes.bucket import Bucket, phase_string
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.log_file import GENERATIONS, HEADER_START, LONGEST_HEADER, LogFile
from vllm_gaudi_ucm.observability.phase_summary import MEMORY, PhaseSummary, summary_text
from vllm_gaudi_ucm.observability.step_record import StepRecord

SCHEMA = "gaudi-ucm.phase-log/1"
COUNTS = ("requests", "prompts", "tokens", "causal_pairs", "shared_pairs", "unique_pairs")
PHASES = {phase_string(c, s, u) for c in (False, True) for s in (False, True) for u in (False, True)}
# Written only if there are any, so that logs of servers without a sparse method do not change.
SPARSE_COUNTS = ("selected_pairs", "sparse", "prompt_remainder")
TRANSFER_COUNTS = ("loaded_blocks", "saved_blocks")
MEMORY_COUNTS = tuple(MEMORY)
# Logs of earlier releases name a count so; reason: they are still read. Remove when: the next release is out.
EARLIER_COUNTS = {"tail": "prompt_remainder"}
OPTIONAL_COUNTS = (*SPARSE_COUNTS, *TRANSFER_COUNTS, *MEMORY_COUNTS, "host_reads")
_BLOCKS = (*TRANSFER_COUNTS, *MEMORY_COUNTS)
TIMES = ("plan_ms", "forward_ms", "sample_ms")
MOST = 1 << 63  # of a number: sums and sizes are counted in 64 bits
REPORTED_BYTES = 1 << 20  # read between two reports of how far it is
LIMITS: dict[str, Any] = {
    **dict.fromkeys(("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens")),
    **dict.fromkeys(("contiguous", "max_shared_blocks")),
    **{"max_selected_blocks": 0, "strip": 0, "window": 0},
}
"""Fields of a header that bound its steps, or name their units, with the meaning of a header without them."""

logger = plugin_logger(__name__)


class PhaseLogError(ValueError):
    """Raised for a phase log that cannot be written or read; the message names the file, the line and what to do."""


class PhaseLog:
    """Appends steps to a file (when there is one) and to `summary`; memory use does not grow with steps.

    Args:
        header: fields of its first line, behind the schema.
        emit: takes the table at the end.
        most_bytes, generations: see `LogFile`.
    """

    def __init__(
        self,
        path: Path | None,
        header: Mapping[str, Any] | None = None,
        emit: Callable[[str], None] = logger.info,
        most_bytes: int | None = None,
        generations: int = GENERATIONS,
    ) -> None:
        self.path = path
        self.summary = PhaseSummary()
        self._emit = emit
        self._file = None if path is None else _create(path, header or {}, most_bytes, generations)

    @property
    def is_open(self) -> bool:
        """True if steps are written; False after a failed write."""
        return self._file is not None

    def append(self, record: StepRecord) -> None:
        """Count one step and write its line; a full disk stops the file, never the engine."""
        self.summary.add(record)
        if self._file is None:
            return
        try:
            self._file.write(_line(record))
        except OSError as error:
            logger.warning("ucm.phase_log: writing %s failed (%s); steps are no longer logged", self.path, error)
            self._file = None

    def close(self) -> None:
        """Close the file and emit the summary table, once; does nothing without a file."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if self.summary.steps:
            self._emit(f"phase log {self.path}\n{summary_text(self.summary)}")


class PhaseLogReader:
    """Reads a log line by line: memory does not grow with its length. A context manager, for one pass.

    Args:
        report: called now and then with the fraction of the file that has been read.
        given: limits from another source: headers may differ in them.

    Raises:
        PhaseLogError: it cannot be read, or is not a phase log.
    """

    def __init__(
        self, path: Path, report: Callable[[float], None] = lambda done: None, given: Collection[str] = ()
    ) -> None:
        self.path = path
        self._report = report
        self._given = given
        with self._errors():
            self._file = path.open("rb")
        try:
            self.header = _parse_header(path, 1, self._first_line())
        except PhaseLogError:
            self._file.close()
            raise

    def __enter__(self) -> PhaseLogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def steps(self) -> Iterator[StepRecord]:
        """Yields the steps not read yet; an incomplete last line of a killed process is dropped, any other fault
        raises.

        Logs that were joined into one file have a header each, with the same limits.
        """
        seen, told = self._file.tell(), 0
        with self._errors():
            size = max(1, os.fstat(self._file.fileno()).st_size)
            for number, line in enumerate(self._file, start=2):
                if not line.endswith(b"\n"):
                    break
                text = line.decode(errors="replace").rstrip("\r\n")
                fields = _parse_object(self.path, number, text)
                if "schema" in fields:
                    self._check_header(number, text)
                else:
                    yield _parse_step(self.path, number, fields)
                seen += len(line)
                if seen - told > REPORTED_BYTES:
                    told = seen
                    self._report(min(1.0, seen / size))
        self._report(1.0)

    def count(self) -> int:
        """Returns how many steps there are, read or not, without parsing them."""
        with self._errors(), self.path.open("rb") as file:
            file.readline()
            return sum(line.endswith(b"\n") and not line.startswith(HEADER_START) for line in file)

    def _check_header(self, number: int, line: str) -> None:
        """Raises PhaseLogError for a log that begins within the file, and is not of such a server."""
        other = different_limit(self.header, _parse_header(self.path, number, line), self._given)
        if other is not None:
            name, here, there = other
            raise PhaseLogError(
                f"{self.path}:{number}: another log begins here, with {name} {there!r}, where the first one has "
                f"{here!r}; expected logs of the same limits: split the file at this line"
            )

    def _first_line(self) -> str:
        with self._errors():
            return self._file.readline(LONGEST_HEADER).decode(errors="replace").rstrip("\r\n")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PhaseLogError(f"{self.path}: cannot be read as a phase log: {error.strerror or error}") from error


def read_phase_log(path: Path) -> tuple[dict[str, Any], list[StepRecord]]:
    """(header, steps) of a log, all at once; see `PhaseLogReader`."""
    with PhaseLogReader(path) as log:
        return log.header, list(log.steps())


def different_limit(
    header: Mapping[str, Any], other: Mapping[str, Any], given: Collection[str] = ()
) -> tuple[str, Any, Any] | None:
    """Returns (name, value, other value) of the first limit, not `given`, in which two headers differ; or None."""
    for name, default in LIMITS.items():
        values = header.get(name, default), other.get(name, default)
        if name not in given and values[0] != values[1]:
            return name, *values
    return None


def bucket_shapes(records: Iterable[StepRecord]) -> Iterator[Bucket]:
    """True shapes of the steps that need buckets; one that ran in a graph for prompt remainders needs none."""
    return (record.bucket for record in records if not record.prompt_remainder)


def _create(path: Path, header: Mapping[str, Any], most_bytes: int | None, generations: int) -> LogFile:
    """Open a new log with its header; logs of the runs before are kept."""
    line = json.dumps({"schema": SCHEMA, **header}, separators=(",", ":")) + "\n"
    try:
        return LogFile(path, line, most_bytes, generations)
    except OSError as error:
        raise PhaseLogError(
            f"ucm.phase_log: cannot write {path}: {error.strerror or error}; "
            "expected a file name in a folder that exists and is writable"
        ) from error


def _line(record: StepRecord) -> str:
    """The JSON line of a step; formatted by hand because json.dumps costs three times as much per step."""
    r = record
    more = ""
    if r.selected_pairs:
        more += f',"selected_pairs":{r.selected_pairs}'
    if r.sparse:
        more += f',"sparse":{r.sparse}'
    if r.prompt_remainder:
        more += f',"prompt_remainder":{r.prompt_remainder}'
    for name in _BLOCKS:
        if getattr(r, name):
            more += f',"{name}":{getattr(r, name)}'
    if r.host_reads:
        more += f',"host_reads":{r.host_reads}'
    if r.host_stages:
        more += f',"host_stages":{json.dumps(r.host_stages)}'
    if r.transfer_ms:
        more += f',"transfer_ms":{r.transfer_ms:.4f}'
    time = f',"time":{r.time:.3f}' if r.time else ""
    return (
        f'{{"step":{r.step}{time},"bucket":{_bucket_json(r.bucket)},"padded":{_bucket_json(r.padded)},'
        f'"requests":{r.requests},"prompts":{r.prompts},"tokens":{r.tokens},"causal_pairs":{r.causal_pairs},'
        f'"shared_pairs":{r.shared_pairs},"unique_pairs":{r.unique_pairs},"plan_ms":{r.plan_ms:.4f},'
        f'"forward_ms":{r.forward_ms:.4f},"sample_ms":{r.sample_ms:.4f}{more}}}\n'
    )


def _bucket_json(bucket: Bucket) -> str:
    phase, query_len, shared_blocks, unique_blocks, logits, selected_blocks, max_prompt_tiles = bucket
    more = f",{selected_blocks}" if selected_blocks else ""
    if max_prompt_tiles != ALL_TILES:
        more = f",{selected_blocks},{max_prompt_tiles}"
    return f'["{phase}",{query_len},{shared_blocks},{unique_blocks},{logits}{more}]'


def _parse_header(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if isinstance(header, dict) and header.get("schema") == SCHEMA:
        return header
    raise PhaseLogError(
        f"{path}:{number}: found {_what_else(line, header)} where a phase log says {SCHEMA!r}: this is no phase log; "
        "expected a file that ucm.phase_log or `gaudi-ucm trace` wrote"
    )


def _what_else(line: str, value: Any) -> str:
    """Describes a first line that is not a header. value: the value of its JSON, None if it is not JSON."""
    if isinstance(value, dict):
        return ascii(value["schema"])[:60] if "schema" in value else "JSON without the field 'schema'"
    # \ufffd stands for bytes that are not text
    if line.startswith("\x1f\ufffd"):
        return "a gzip file (unpack it)"
    return ascii(line[:40]) if line else "an empty file"


def _parse_step(path: Path, number: int, fields: dict[str, Any]) -> StepRecord:
    for earlier, name in EARLIER_COUNTS.items():
        if earlier in fields:
            warnings.warn(
                f"{path}: phase logs call the field {earlier!r} {name!r} now; the earlier name is read for one more "
                "release",
                FutureWarning,
                stacklevel=1,
            )
            fields = fields | {name: fields[earlier]}
    try:
        bucket, padded = _parse_bucket(fields["bucket"]), _parse_bucket(fields["padded"])
        sizes: dict[str, Any] = {name: _number(fields, name, int) for name in COUNTS}
        sizes |= {name: _number(fields, name, int) for name in OPTIONAL_COUNTS if name in fields}
        sizes["host_stages"] = _names(fields, "host_stages")
        times = (*TIMES, *(name for name in ("transfer_ms", "time") if name in fields))
        sizes |= {name: float(_number(fields, name, int, float)) for name in times}
        return StepRecord(
            step=_number(fields, "step", int),
            bucket=bucket,
            padded=padded,
            **sizes,
        )
    except KeyError as error:
        raise PhaseLogError(f"{path}:{number}: the step has no field {error}") from error
    except ValueError as error:
        raise PhaseLogError(f"{path}:{number}: {error}") from error


def _parse_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PhaseLogError(f"{path}:{number}: not JSON ({error}); remove the line to read the rest") from error
    if not isinstance(value, dict):
        raise PhaseLogError(f"{path}:{number}: found {line[:40]!r}, expected a JSON object")
    return value


def _number(fields: dict[str, Any], name: str, *types: type) -> Any:
    value = fields[name]
    # NaN is within no bounds
    if type(value) not in types or not 0 <= value < MOST:
        raise ValueError(f"field {name!r} is {value!r}, expected a number from 0 to 2^63")
    return value


def _names(fields: dict[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"field {name!r} is {value!r}, expected a list of names")
    return tuple(value)


def _parse_bucket(value: Any) -> Bucket:
    if isinstance(value, list) and len(Bucket._fields) - 2 <= len(value) <= len(Bucket._fields):
        phase, *sizes = value
        if isinstance(phase, str) and phase in PHASES and all(type(size) is int and 0 <= size < MOST for size in sizes):
            return Bucket(phase, *sizes)
    raise ValueError(
        f"found bucket {value!r}, expected [phase, query_len, shared_blocks, unique_blocks, logits], "
        "selected_blocks where there are any, max_prompt_tiles where it is known"
    )
