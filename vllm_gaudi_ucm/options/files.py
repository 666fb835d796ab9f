"""Reads a configuration file, YAML or JSON: the mapping itself, or under its own key alone."""

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import yaml

from vllm_gaudi_ucm.options.errors import Problem, UcmConfigError

MOST_BYTES = 1 << 20
MOST_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where plain YAML would silently drop the first, and too many values.

    An alias counts as all values of its anchor: a few lines of aliases of aliases stand for billions of values.
    """

    # a date is text here: no option is one, and a path may look like one
    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_values = 0
        self._values_in: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        before, mark = self._num_values, self.peek_event().start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if is_alias:
            if node not in self._values_in:
                raise yaml.MarkedYAMLError(problem="an alias inside of its own anchor", problem_mark=mark)
            self._num_values += self._values_in[node]
        else:
            self._num_values += 1
            self._values_in[node] = self._num_values - before
        if self._num_values > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"more than {MOST_VALUES:,} values", problem_mark=mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_config_file(path: Path, key: str = "ucm") -> Any:
    """Reads the value of a file that was given for `key`; an empty file is an empty mapping. Raises `UcmConfigError`.

    A file with the last part of `key` as its only key holds the value under it.
    """
    path = path.expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UcmConfigError.malformed(f"file {str(path)!r}", f"more than {MOST_BYTES >> 20} MiB", key)
        text = data.decode("utf-8")
    except OSError as error:
        what = f"file {str(path)!r} that cannot be read ({error.strerror})"
        raise UcmConfigError([Problem(key, what, "the path of a YAML or JSON file")]) from error
    except UnicodeDecodeError as error:
        raise UcmConfigError.malformed(f"file {str(path)!r}", "bytes that are not UTF-8 text", key) from error
    source = f"file {str(path)!r}"
    value = parse_json(text, source, key) if path.suffix == ".json" else _parse_yaml(text, source, key)
    name = key.rpartition(".")[2]
    if isinstance(value, dict) and list(value) == [name]:
        value = value[name]
    return {} if value is None else value


def parse_json(text: str, source: str = "text", key: str = "ucm") -> Any:
    """Parses JSON text that was given for `key`; source: names the text, for the message.

    Raises `UcmConfigError`.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        what = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise UcmConfigError.malformed(source, what, key) from error
    except (ValueError, RecursionError) as error:
        raise UcmConfigError.malformed(source, _unreadable(error), key) from error


def _parse_yaml(text: str, source: str, key: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UcmConfigError.malformed(source, f"{place}{error.problem}", key) from error
    except yaml.YAMLError as error:
        raise UcmConfigError.malformed(source, str(error), key) from error
    except (ValueError, RecursionError) as error:
        raise UcmConfigError.malformed(source, _unreadable(error), key) from error


def _unreadable(error: ValueError | RecursionError) -> str:
    """Returns why well-formed text cannot be read: Python's error on numbers and dates, or its depth."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error).partition("; use sys.")[0]
