"""Reads a configuration file, YAML or JSON: the mapping itself, or under a single key `ucm`."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from vllm_gaudi_ucm.config_error import Problem, UcmConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where plain YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_config_file(path: Path) -> Any:
    """The file's value under `ucm`, or the whole file; an empty file is an empty mapping. Raises `UcmConfigError`."""
    path = path.expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        what = f"file {str(path)!r} that cannot be read ({error.strerror})"
        raise UcmConfigError([Problem("ucm", what, "the path of a YAML or JSON file")]) from error
    except UnicodeDecodeError as error:
        raise UcmConfigError.malformed(f"file {str(path)!r}", "bytes that are not UTF-8 text") from error
    value = _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)
    if isinstance(value, dict) and list(value) == ["ucm"]:
        value = value["ucm"]
    return {} if value is None else value


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UcmConfigError.malformed(f"file {str(path)!r}", f"{place}{error.problem}") from error
    except yaml.YAMLError as error:
        raise UcmConfigError.malformed(f"file {str(path)!r}", str(error)) from error


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UcmConfigError.malformed(
            f"file {str(path)!r}", f"line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
