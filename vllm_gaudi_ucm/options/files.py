"""Reads a configuration file, YAML or JSON: the mapping itself, or under its own key alone."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError


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


def read_config_file(path: Path, key: str = "ucm") -> Any:
    """The value of a file that was given for `key`; an empty file is an empty mapping. Raises `UcmConfigError`.

    A file with the last part of `key` as its only key holds the value under it.
    """
    path = path.expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        what = f"file {str(path)!r} that cannot be read ({error.strerror})"
        raise UcmConfigError([Problem(key, what, "the path of a YAML or JSON file")]) from error
    except UnicodeDecodeError as error:
        raise UcmConfigError.malformed(f"file {str(path)!r}", "bytes that are not UTF-8 text", key) from error
    value = _parse_json(path, text, key) if path.suffix == ".json" else _parse_yaml(path, text, key)
    name = key.rpartition(".")[2]
    if isinstance(value, dict) and list(value) == [name]:
        value = value[name]
    return {} if value is None else value


def _parse_yaml(path: Path, text: str, key: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UcmConfigError.malformed(f"file {str(path)!r}", f"{place}{error.problem}", key) from error
    except yaml.YAMLError as error:
        raise UcmConfigError.malformed(f"file {str(path)!r}", str(error), key) from error


def _parse_json(path: Path, text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UcmConfigError.malformed(
            f"file {str(path)!r}", f"line {error.lineno}, column {error.colno}: {error.msg}", key
        ) from error
