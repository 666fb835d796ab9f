"""No file imports itself by way of others; imports for types, and those in functions, count."""

from __future__ import annotations

from tests.architecture.sources import imported, module_of, sources


def arrows() -> dict[str, set[str]]:
    """Module to the modules that it imports, without the name of the package."""
    files = {module_of(file): file for _, file in sources()}
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        # a name in a module counts as that module
        names = {name if name in files else name.rpartition(".")[0] for name in imported(file)}
        found[_short(module)] = {_short(name) for name in names if name in files and name != module}
    return found


def _short(module: str) -> str:
    return module.partition(".")[2]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Modules at the end of some way from `start`."""
    found: set[str] = set()
    ahead = list(graph[start])
    while ahead:
        module = ahead.pop()
        if module not in found:
            found.add(module)
            ahead += graph[module]
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of modules each of which imports all others, by way of some."""
    reached = {module: reachable(graph, module) for module in graph}
    found: list[set[str]] = []
    for module, others in reached.items():
        circle = {other for other in others if module in reached[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_what_counts_as_a_circle() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == [{"b", "c"}]


def test_no_circle_of_files() -> None:
    assert circles(arrows()) == []
