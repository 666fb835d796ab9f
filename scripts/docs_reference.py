"""Pages of the site that are made from elsewhere: configuration and command line from the code, tests of failure modes
from their tags, contributing and the changelog from the files at the top of the repository. Run by mkdocs-gen-files.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import mkdocs_gen_files

from vllm_gaudi_ucm.cli.main import build_parser, commands
from vllm_gaudi_ucm.config.ucm_config import (
    OptionRow,
    describe,
    describe_section,
    markdown_table,
    section_description,
    sections,
)
from vllm_gaudi_ucm.connector.transfer_config import EXTRA_CONFIG, ConnectorOptions
from vllm_gaudi_ucm.store.factory import STORES, store_class

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = """# Configuration

Options are under the key `ucm` of vLLM's `--additional-config`, as JSON or as the path of a YAML or JSON file:

```bash
vllm serve MODEL --additional-config '{"ucm": {"phase_log": "phases.jsonl"}}'
vllm serve MODEL --additional-config '{"ucm": "ucm.yaml"}'
```

Unknown keys, wrong types and bad ranges are refused with the key's full name and the nearest valid one.
`gaudi-ucm config --check FILE` checks a file without starting an engine.

<style>.md-typeset td:first-child code { white-space: nowrap }</style>
"""
SECTION = """
## `{key}`

{about}

{table}
"""
CONNECTOR = "Options of `UcmConnector` in `--kv-transfer-config`; `store` is one of the [stores](#store-file)."
STORE = """
## Store `{kind}`

Options under `store` in `kv_connector_extra_config` and in `ucm.memory_mode`.

"""
COMMAND_LINE = """# Command line

Exit codes: 0 done; 1 a problem was found; 2 wrong usage, or an error that you can correct; 130 interrupted.
"""


def usage(name: str) -> str:
    """The help of a command, without the width of the terminal that builds the page."""
    parser = build_parser([name])
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    chosen = subparsers.choices[name]
    chosen.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=110)
    return str(chosen.format_help())


def options_table(key: str, rows: list[OptionRow], about: str) -> str:
    """A section of the configuration, with the last part of each key."""
    table = markdown_table([row._replace(key=row.key.rpartition(".")[2]) for row in rows])
    return SECTION.format(key=key, about=about, table=table)


with mkdocs_gen_files.open("reference/configuration.md", "w") as page:
    page.write(CONFIGURATION)
    for key, rows in sections(describe()).items():
        page.write(options_table(key, rows, section_description(key)))
    connector = sections(describe_section(ConnectorOptions, EXTRA_CONFIG))
    page.write(options_table(EXTRA_CONFIG, connector[EXTRA_CONFIG], CONNECTOR))
    prefetch = f"{EXTRA_CONFIG}.prefetch"
    page.write(options_table(prefetch, connector[prefetch], "The engine that loads blocks for the connector."))
    for kind in STORES.names():
        options = describe_section(store_class(kind).Options, "store")
        page.write(STORE.format(kind=kind) + markdown_table(options) + "\n")

with mkdocs_gen_files.open("reference/cli.md", "w") as page:
    page.write(COMMAND_LINE)
    for name in commands():
        page.write(f"\n## gaudi-ucm {name}\n\n```text\n{usage(name)}```\n")

with mkdocs_gen_files.open("failure-modes.md", "w") as page:
    # by its path: mkdocs has no folder of the repository on its own
    modes = runpy.run_path(str(ROOT / "scripts" / "failure_modes.py"))
    page.write(modes["with_tests"](modes["PAGE"].read_text(encoding="utf-8"), modes["tags"](ROOT / "tests")))

for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
    with mkdocs_gen_files.open(name.lower(), "w") as page:
        # the site begins with the folder docs/ of the repository
        page.write((ROOT / name).read_text(encoding="utf-8").replace("](docs/", "]("))
