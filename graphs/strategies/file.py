"""Reads buckets from a YAML file, and writes such files. The schema is described in docs/guides/buckets.md."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import yaml

from vllm_gaudi_ucm.graphs.lookup import BucketSet
from vllm_gaudi_ucm.graphs.shapes.bucket import ForwardShape
from vllm_gaudi_ucm.graphs.shapes.limits import Limits
from vllm_gaudi_ucm.graphs.shapes.prompt_tiles import ALL_TILES
from vllm_gaudi_ucm.graphs.shapes.size_levels import without_unreachable
from vllm_gaudi_ucm.graphs.strategies.base import BucketRequest, BucketStrategy, Source

SCHEMA = "gaudi-ucm.buckets/1"
KEYS = ("schema", "made_for", "limits", "logits", "forward")
# Limits that are measured or chosen when a server starts, so they differ between starts; shapes are cut to them.
MEASURED = ("num_blocks", "contiguous", "max_shared_blocks", "max_selected_blocks", "bounds_prompt_tiles")
# Limits that are written only if they differ from the default; files of servers without the feature lack them.
BOUNDS = "bounds_prompt_tiles"
# Files of earlier releases call it so. Reason: they are still served. Remove when: the next release is out.
EARLIER_BOUNDS = "causal_reach"
OPTIONAL = {"max_selected_blocks": 0, "bounds_prompt_tiles": False, "strip": 0, "window": 0}


MOST_BYTES = 4 << 20
MOST = 1 << 31  # of a size: costs are computed in 64 bits
MOST_SHOWN = 200  # characters of a value in a message


class BucketFileError(ValueError):
    """Raised for a bucket file that cannot be used; the message names the file, the entry, and what was expected."""


class _Loader(yaml.SafeLoader):
    """Safe YAML without anchors and aliases, which can stand for any number of values; bucket files do not use them."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(problem="expected no anchors and aliases", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


@dataclass(frozen=True)
class FromFile(BucketStrategy):
    """The buckets of the file `request.path`, which must have been made for the same limits."""

    needs: ClassVar[Source | None] = "buckets"

    def choose(self, request: BucketRequest) -> BucketSet:
        """Raises BucketFileError for a file that is malformed, made for other limits, or has more buckets than
        `max_graphs`."""
        if request.path is None:
            raise BucketFileError("bucket strategy file needs the path of a bucket file")
        path, limits = request.path, request.limits
        limits_there, forward, logits = read_bucket_file(path)
        _check_limits(path, limits_there, limits)
        _check_selected(path, limits_there, limits)
        # the largest step of that server is the largest step of this one, even if this one has more blocks
        largest, here = limits_there.maximum.forward, limits.maximum.forward
        cut = {here if s == largest else ForwardShape.from_sizes("c" in s.phase, *_cut(s, limits)) for s in forward}
        rows = {min(row, limits.max_num_seqs) for row in logits}
        buckets = BucketSet(without_unreachable(cut, limits, request.cost), rows, limits, request.cost)
        if request.max_graphs is not None and buckets.num_graphs > request.max_graphs:
            raise BucketFileError(
                f"{path}: has {buckets.num_graphs} graphs, at most {request.max_graphs} are allowed; "
                "raise the limit or tune again with fewer"
            )
        return buckets


def read_bucket_file(path: Path) -> tuple[Limits, list[ForwardShape], list[int]]:
    """Reads (limits, forward shapes, logits rows) from a file."""
    value = _read_yaml(path)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        found = value.get("schema", "no schema") if isinstance(value, dict) else type(value).__name__
        raise BucketFileError(f"{path}: found schema {_shown(found)}, expected {SCHEMA!r}; is this a bucket file?")
    for key in value:
        if key not in KEYS:
            raise BucketFileError(f"{path}: unknown key {_shown(key)}, expected {', '.join(KEYS)}")
    limits = _limits(path, value.get("limits"))
    forward = [_shape(path, entry, limits) for entry in _list(path, value, "forward")]
    rows = [_row(path, entry) for entry in _list(path, value, "logits")]
    return limits, forward, rows


def _read_yaml(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BucketFileError(f"{path}: cannot be read as a bucket file: {error}") from error
    if len(data) > MOST_BYTES:
        raise BucketFileError(f"{path}: more than {MOST_BYTES >> 20} MiB; is this a bucket file?")
    try:
        return yaml.load(data.decode("utf-8"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise BucketFileError(f"{path}: cannot be read as a bucket file: {error}") from error
    except RecursionError as error:
        raise BucketFileError(f"{path}: not YAML: nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).partition("; use sys.")[0].split())
        raise BucketFileError(f"{path}: not YAML: {why}") from error


def write_bucket_file(path: Path, buckets: BucketSet, made_for: Mapping[str, Any]) -> None:
    """Writes the buckets; `made_for` tells a reader their origin."""
    names, limits = "phase, query_len, shared_blocks, unique_blocks", asdict(buckets.limits)
    if buckets.limits.max_selected_blocks or buckets.limits.bounds_prompt_tiles:
        names += ", selected_blocks (0 where missing)"
    if buckets.limits.bounds_prompt_tiles:
        names += ", max_prompt_tiles (no bound where missing)"
    for name, default in OPTIONAL.items():
        if limits[name] == default:
            del limits[name]
    head = {"schema": SCHEMA, "made_for": dict(made_for), "limits": limits}
    text = yaml.safe_dump(head, sort_keys=False)
    text += f"logits: {list(buckets.logits)}\nforward:  # {names}; cheapest first\n"
    text += "".join(f"- {json.dumps(shape.to_list())}\n" for shape in buckets.forward)
    path.write_text(text, encoding="utf-8")


def _check_limits(path: Path, there: Limits, here: Limits) -> None:
    for field in fields(Limits):
        found, expected = getattr(there, field.name), getattr(here, field.name)
        if field.name not in MEASURED and found != expected:
            raise BucketFileError(
                f"{path}: made for {field.name} {found}, the server has {expected}; "
                f"start the server with {found}, or tune again for {expected}"
            )


def _check_selected(path: Path, there: Limits, here: Limits) -> None:
    """Checks selected blocks. Shapes cut to a smaller limit are still useful; without any, every sparse step would run
    in the maximum.
    """
    if here.max_selected_blocks and not there.max_selected_blocks:
        raise BucketFileError(
            f"{path}: made for a server without a sparse method, this one selects up to {here.max_selected_blocks} "
            "blocks; tune again on a log with selected blocks, or start the server without the file"
        )


def _cut(shape: ForwardShape, limits: Limits) -> tuple[int, int, int, int, int]:
    maximum = limits.maximum
    return (
        min(shape.query_len, maximum.query_len),
        min(shape.shared_blocks, maximum.shared_blocks),
        min(shape.unique_blocks, maximum.unique_blocks),
        min(shape.selected_blocks, maximum.selected_blocks),
        shape.max_prompt_tiles if limits.bounds_prompt_tiles else ALL_TILES,
    )


def _limits(path: Path, value: Any) -> Limits:
    names = [field.name for field in fields(Limits) if field.name not in OPTIONAL]
    if not isinstance(value, dict) or set(value) - {*OPTIONAL, EARLIER_BOUNDS} != set(names):
        raise BucketFileError(f"{path}: limits: found {_shown(value)}, expected a mapping with {', '.join(names)}")
    if EARLIER_BOUNDS in value:
        warnings.warn(
            f"{path}: bucket files call limits.{EARLIER_BOUNDS} {BOUNDS} now; the earlier name is read for one more "
            "release",
            FutureWarning,
            stacklevel=1,
        )
        value = {BOUNDS if name == EARLIER_BOUNDS else name: found for name, found in value.items()}
    for name, found in value.items():
        expected = bool if name in ("contiguous", "bounds_prompt_tiles") else int
        if type(found) is not expected and not (name == "max_shared_blocks" and found is None):
            raise BucketFileError(f"{path}: limits.{name}: found {_shown(found)}, expected {expected.__name__}")
        if expected is int and found is not None and found >= MOST:
            raise BucketFileError(f"{path}: limits.{name}: found {_shown(found)}, expected less than {MOST}")
    try:
        return Limits(**value)
    except ValueError as error:
        raise BucketFileError(f"{path}: {error}") from error


def _list(path: Path, value: dict[str, Any], key: str) -> list[Any]:
    entries = value.get(key)
    if not isinstance(entries, list) or not entries:
        raise BucketFileError(f"{path}: {key}: found {_shown(entries)}, expected a list with at least one entry")
    return entries


def _row(path: Path, entry: Any) -> int:
    if type(entry) is not int or not 1 <= entry < MOST:
        raise BucketFileError(f"{path}: logits: found {_shown(entry)}, expected a number of rows")
    return entry


def _shape(path: Path, entry: Any, limits: Limits) -> ForwardShape:
    sizes = entry[1:] if isinstance(entry, list) and len(entry) in (4, 5, 6) else [None]
    if any(type(size) is not int or not 0 <= size < MOST for size in sizes):
        expected = (
            "[phase, query_len, shared_blocks, unique_blocks], selected_blocks where there are any, "
            "max_prompt_tiles where there is a bound"
        )
        raise BucketFileError(f"{path}: forward: found {_shown(entry)}, expected {expected}")
    shape = ForwardShape(*entry)
    consistent = ForwardShape.from_sizes(str(shape.phase)[:1] == "c", *shape.sizes)
    if shape.max_prompt_tiles < 1:
        raise BucketFileError(f"{path}: forward: found {entry!r}, expected max_prompt_tiles of at least one tile")
    if shape[:5] != consistent[:5] or shape.query_len < 1:
        raise BucketFileError(
            f"{path}: forward: found {entry!r}, expected at least one row and the phase {consistent.phase!r}"
        )
    most = limits.maximum.forward
    if any(size > limit for size, limit in zip(shape.sizes, most.sizes, strict=True)):
        raise BucketFileError(f"{path}: forward: {entry!r} exceeds the file's own limits {most.to_list()[1:]}")
    return consistent


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
