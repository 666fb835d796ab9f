"""Files with ranges that Intel Neural Compressor (INC) measured, or with scales that it made of them.

A file is JSON: `Mode` is `DynamicRange` (measured maxima) or `Scale`, `Nodes` has an object for each module, with
numbers or nested lists of them for `inputs`, `outputs` and `params`. Each rank of a calibration writes one. INC writes
the same as pickled arrays (`.npz`), which are never read: unpickling runs code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vllm_gaudi_ucm.layers.measured.quant_config import QuantConfig, QuantConfigError, read_json

Mode = Literal["DynamicRange", "Scale"]
LINEAR_KINDS = (
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
)
"""Classes of linear layers that INC knows. Others, such as routers, stay in the model's dtype."""
_COMPILED = "_orig_mod."


class Node(NamedTuple):
    """The numbers of a module: maxima of magnitudes, or scales.

    outputs: as they are written; no layer here needs them, so they are not read. weight: None if it was not measured.
    """

    inputs: tuple[float, ...] = ()
    outputs: tuple[float, ...] = ()
    weight: float | None = None


class Measurements(NamedTuple):
    """All modules by name, over all ranks of a calibration. ranks: how many wrote files."""

    mode: Mode
    nodes: Mapping[str, Node]
    files: tuple[Path, ...]
    ranks: int


def read_measurements(config: QuantConfig) -> Measurements:
    """Finds and reads the files that a `QUANT_CONFIG` names: measured maxima, or scales if only these are there.

    The numbers of several ranks become their maximum, so any number of workers may serve.

    Raises QuantConfigError if files are missing, or hold something else.
    """
    folder, base = _folder(config)
    stem = f"{base}_hooks_{config.observer}"
    kinds: tuple[tuple[Mode, str], ...] = (("DynamicRange", stem), ("Scale", f"{stem}_{config.method.name}"))
    for mode, name in kinds:
        files = _files_of_ranks(folder, name)
        if files:
            nodes = [_read_nodes(file, mode) for file in files]
            return Measurements(mode, _largest(nodes), tuple(files), len(files))
    pickled = sorted(file.name for file in folder.glob(f"{base}_hooks_*.npz"))
    if pickled:
        raise QuantConfigError(
            f"{folder}: found {pickled[0]} without its JSON file; an .npz holds pickled objects, which are not read; "
            "copy the .json files of the calibration, too"
        )
    others = sorted(file.name for file in folder.glob(f"{base}*"))[:5]
    config.refuse(
        "dump_stats_path", config.prefix, f"files {stem}.json or {stem}_<rank>_<world>.json in {folder}",
        f"copy the calibration's folder (found {', '.join(others) or 'no file with this beginning'})",
    )  # fmt: skip


def _folder(config: QuantConfig) -> tuple[Path, str]:
    """Returns the folder with the files, and the beginning of their names.

    The path may be another machine's, so its last parts are also looked for next to the configuration.
    """
    given, near = Path(config.prefix), config.path.parent
    places = (given.parent, near / given.parent, near / given.parent.name, near)
    for place in places:
        if place.is_dir() and any(place.glob(f"{_literal(given.name)}_hooks_*")):
            return place, given.name
    looked = ", ".join(map(str, dict.fromkeys(places)))
    config.refuse(
        "dump_stats_path", config.prefix, f"the beginning of files in one of {looked}",
        "keep the calibration's folder next to its QUANT_CONFIG",
    )  # fmt: skip


def _literal(name: str) -> str:
    """Returns a pattern of `glob` that matches only this name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _files_of_ranks(folder: Path, stem: str) -> list[Path]:
    """Returns the files of all ranks of the smallest complete set. Raises QuantConfigError if only some are there."""
    whole = folder / f"{stem}.json"
    if whole.is_file():
        return [whole]
    found: dict[int, set[int]] = {}
    for file in folder.glob(f"{_literal(stem)}_*.json"):
        if numbers := re.fullmatch(r"_(-?\d+)_(\d+)\.json", file.name[len(stem) :]):
            found.setdefault(int(numbers[2]), set()).add(int(numbers[1]))
    complete = [world for world, ranks in found.items() if ranks >= set(range(world)) and world]
    if complete:
        world = min(complete)
        return [folder / f"{stem}_{rank}_{world}.json" for rank in range(world)]
    if found:
        world, ranks = min(found.items())
        missing = sorted(set(range(world)) - ranks)
        raise QuantConfigError(
            f"{folder}: found {stem}_<rank>_{world}.json of the ranks {sorted(ranks)}, expected 0 to {world - 1}; "
            f"copy {', '.join(f'{stem}_{rank}_{world}.json' for rank in missing[:3])}, too"
        )
    return []


def _read_nodes(file: Path, mode: Mode) -> dict[str, Node]:
    content = read_json(file, "measurements")
    if content.get("Mode") != mode:
        raise QuantConfigError(
            f"measurements {file}: Mode: found {content.get('Mode')!r}, expected {mode!r}; "
            "it is another file of INC under this name; calibrate again"
        )
    nodes = content.get("Nodes")
    if not isinstance(nodes, dict) or not nodes:
        raise QuantConfigError(
            f"measurements {file}: Nodes: found none, expected an object for each measured module; calibrate again"
        )
    return {name.replace(_COMPILED, ""): _read_node(file, name, node) for name, node in nodes.items()}


def _read_node(file: Path, name: str, node: Any) -> Node:
    if not isinstance(node, dict):
        raise QuantConfigError(f"measurements {file}: Nodes.{name}: found {type(node).__name__}, expected an object")
    # outputs are left out: INC measured unset memory there, such as nan or 2e38 of layers whose ranks are added
    values = node.get("inputs", node.get("input")) or []
    if not isinstance(values, list):
        values = [values]
    inputs = tuple(_number(file, f"{name}.inputs", value) for value in values)
    params = node.get("params") or {}
    weight = params.get("weight") if isinstance(params, dict) else None
    if isinstance(weight, dict):
        # scales of outputs and of inputs, of which weights here have the former
        weight = weight.get("0")
    return Node(inputs, weight=None if weight is None else _number(file, f"{name}.params.weight", weight))


def _number(file: Path, key: str, value: Any) -> float:
    """Returns the largest number of nested lists, which have one for each channel."""
    if isinstance(value, list) and value:
        return max(_number(file, key, one) for one in value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise QuantConfigError(
            f"measurements {file}: Nodes.{key}: found {value!r}, expected finite numbers of at least 0; "
            "calibrate again, with prompts for which the model's numbers stay finite"
        )
    return float(value)


def _largest(ranks: Iterable[Mapping[str, Node]]) -> dict[str, Node]:
    """Returns the maximum over ranks."""
    found: dict[str, Node] = {}
    for nodes in ranks:
        for name, node in nodes.items():
            found[name] = _joined(found[name], node) if name in found else node
    return found


def _joined(one: Node, other: Node) -> Node:
    weights = [weight for weight in (one.weight, other.weight) if weight is not None]
    return Node(tuple(map(max, one.inputs, other.inputs)), weight=max(weights, default=None))


class Calibration(NamedTuple):
    """Results of a calibration: the folder of the model, the short name of the card (g2, g3), and the modules."""

    folder: Path
    card: str
    nodes: Mapping[str, Node]
    blocked: tuple[str, ...] = ()


CARDS = {"g2": "GAUDI2", "g3": "GAUDI3"}
"""Short names of cards in names of files."""


def write_calibration(found: Calibration) -> Path:
    """Writes measurements and a `QUANT_CONFIG` for them, with INC's names and form. Returns the latter's path."""
    folder = found.folder / found.card
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / "inc_output"
    nodes = {
        name: {
            "inputs": [[[value]] for value in node.inputs],
            "outputs": [[[value]] for value in node.outputs],
            "params": {} if node.weight is None else {"weight": [[node.weight]]},
        }
        for name, node in found.nodes.items()
    }
    _write(
        folder / "inc_output_hooks_maxabs_0_1.json",
        {"GlobalRank": None, "LocalRank": 0, "Mode": "DynamicRange", "Nodes": nodes},
    )
    _write(folder / "inc_output_hooks_maxabs_0_1_mod_list.json", list(nodes))
    config = found.folder / f"maxabs_quant_{found.card}.json"
    _write(
        config,
        {
            "mode": "QUANTIZE",
            "observer": "maxabs",
            "scale_method": "maxabs_hw",
            "allowlist": {"types": [], "names": []},
            "blocklist": {"types": [], "names": list(found.blocked)},
            "device_for_scales": CARDS[found.card],
            "dump_stats_path": str(prefix),
        },
    )
    return config


def _write(path: Path, content: object) -> None:
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
