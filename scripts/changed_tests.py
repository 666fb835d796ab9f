"""Runs the tests that a change touches: `python -m scripts.changed_tests [--base REVISION] [--list] [-- PYTEST...]`.

A change is the difference from a base, committed or not. Tests are found by their imports and by their room, without an
earlier run: engines run in processes of their own, which a tracer of executed lines would not see.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = "vllm_gaudi_ucm"
# Folders of the repository, and the packages that their modules are in.
FOLDERS = {
    PACKAGE: PACKAGE,
    "ops": f"{PACKAGE}.ops",
    "graphs": f"{PACKAGE}.graphs",
    "tools": "",  # it contains a package of its own
    "tests": "tests",
    "scripts": "scripts",
    "benchmarks": "benchmarks",
    "examples": "examples",
}
# Any change may break these, which read the whole code.
ALWAYS = "tests/architecture"
# A change of the package may break an engine.
ENGINE = "tests/engine/test_phases.py"
MODULE = re.compile(rf"{PACKAGE}(?:_tools)?(?:\.\w+)+")


class Tree:
    """The Python files of a repository, and their imports.

    root: of the repository. files: its files, and removed ones that may still be imported, as paths from there.
    """

    def __init__(self, root: Path, files: Collection[str]) -> None:
        self.root = root
        self.modules = {name: file for file in files if (name := module_of(file)) is not None}
        self.files = sorted(file for file in files if (root / file).is_file())
        self.tests = [file for file in self.files if is_test(file)]
        self._of_tests = {file for file in self.files if file.startswith("tests/") and file.endswith(".py")}

    @cache  # noqa: B019  # as long as the program
    def imports(self, file: str) -> frozenset[str]:
        """The files that a file imports, also in functions, and those that its strings name as modules."""
        names: set[str] = set()
        for node in ast.walk(ast.parse((self.root / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= set(MODULE.findall(node.value))
        return frozenset(self.modules[name] for name in names if name in self.modules) - {file}

    def users(self, changed: str) -> set[str]:
        """Tests that import a file, by themselves or by helpers of tests."""
        found, waiting = {changed}, [changed]
        while waiting:
            used = waiting.pop()
            for file in self._of_tests - found:
                if used in self.imports(file):
                    found.add(file)
                    waiting += [] if is_test(file) else [file]
        return found.intersection(self.tests) - {changed}

    def readers(self, changed: str) -> set[str]:
        """The tests whose text names a file that is not Python: by its path, or by its name if that is unique."""
        name = Path(changed).name
        alone = sum(Path(file).name == name for file in self.files) == 1
        named = re.compile(rf"(?<![\w.-])(?:{re.escape(changed)}{'|' + re.escape(name) if alone else ''})(?![\w.-])")
        return {file for file in self.tests if named.search((self.root / file).read_text(encoding="utf-8"))}


def module_of(file: str) -> str | None:
    """Full name of the module in a file; None if there is none."""
    path = Path(file)
    if path.suffix != ".py" or path.parts[0] not in FOLDERS:
        return None
    parts = [FOLDERS[path.parts[0]], *path.with_suffix("").parts[1:]]
    return ".".join(filter(None, parts[:-1] if parts[-1] == "__init__" else parts))


def is_test(file: str) -> bool:
    return file.startswith("tests/") and re.fullmatch(r"test_\w+\.py", Path(file).name) is not None


def room_of(file: str) -> str | None:
    """The folder of tests that mirrors a file's room."""
    folder, *rest = Path(file).parts
    if folder == "tools":
        folder, rest = PACKAGE, rest[1:]
    if folder == PACKAGE and len(rest) > 1:
        return f"tests/{rest[0]}"
    return f"tests/{folder}" if folder in ("ops", "graphs", "docs", "examples", "benchmarks", "docker") else None


def choose(tree: Tree, changed: Iterable[str]) -> dict[str, str]:
    """The tests that a change of these files touches, each with the reason, nearest first."""
    chosen: dict[str, str] = {}

    def add(files: Iterable[str], reason: str) -> None:
        for file in sorted(files):
            chosen.setdefault(file, reason)

    changed = sorted(changed)
    add((file for file in changed if file in tree.tests), "has changed")
    for file in changed:
        add(tree.users(file) if file.endswith(".py") else tree.readers(file), f"uses {file}")
    for file in changed:
        room = room_of(file)
        add((test for test in tree.tests if room and test.startswith(f"{room}/")), f"is in the room of {file}")
    if any(Path(file).parts[0] in (PACKAGE, "ops", "graphs") for file in changed):
        add([ENGINE], "runs an engine")
    if changed:
        add((test for test in tree.tests if test.startswith(f"{ALWAYS}/")), "reads the whole code")
    return {file: reason for file, reason in chosen.items() if file in tree.tests}


def git(root: Path, *arguments: str) -> list[str]:
    """Lines that git prints. Raises CalledProcessError if it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def base_of(root: Path) -> str:
    """Returns the point where this branch left its upstream, or otherwise the main branch; HEAD if there is neither."""
    for branch in ("@{upstream}", "origin/main", "main"):
        try:
            return git(root, "merge-base", "HEAD", branch)[0]
        except subprocess.CalledProcessError:
            continue
    return "HEAD"


def changed_files(root: Path, base: str) -> set[str]:
    """Files that differ from the base, in commits or in the working tree, new and removed ones among them."""
    return {*git(root, "diff", "--name-only", "--no-renames", base), *untracked(root)}


def untracked(root: Path) -> list[str]:
    return git(root, "ls-files", "--others", "--exclude-standard")


def commands(chosen: dict[str, str], slow: bool, options: list[str]) -> Iterator[list[str]]:
    """Arguments of pytest: changed tests, slow ones among them, and the quick tests of the other files."""
    own = [file for file, reason in chosen.items() if reason == "has changed"]
    others = [file for file in chosen if file not in own]
    if slow:
        own, others = [*own, *others], []
    if own:
        yield [*options, *own]
    if others:
        yield [*options, "-m", "not slow", *others]


NO_TESTS = 5
"""Exit status of pytest if it found no tests: all tests of these files are slow."""


def main(arguments: list[str] | None = None, root: Path = Path()) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--base", help="compare with this revision (default: where this branch left its upstream)")
    parser.add_argument("--slow", action="store_true", help="run the slow tests of all chosen files, too")
    parser.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("pytest", nargs="*", metavar="PYTEST", help="arguments for pytest, after --")
    args = parser.parse_args(arguments)
    try:
        base = args.base or base_of(root)
        changed = changed_files(root, base)
        tree = Tree(root, {*git(root, "ls-files"), *untracked(root), *changed})
    except subprocess.CalledProcessError as error:
        print(
            f"--base {args.base}: git found no such revision here ({error.stderr.strip()}); name a commit or a branch"
        )
        return 2
    chosen = choose(tree, changed)
    print(f"{len(changed)} files differ from {base[:12]}; {len(chosen)} of {len(tree.tests)} test files are chosen:")
    for file, reason in chosen.items():
        print(f"  {file}  {reason}")
    if args.list:
        return 0
    status = 0
    for command in commands(chosen, args.slow, args.pytest):
        found = subprocess.run([sys.executable, "-m", "pytest", *command], cwd=root, check=False).returncode
        status = status or (0 if found == NO_TESTS else found)
    return status


if __name__ == "__main__":
    sys.exit(main())
