"""The contracts with vLLM that this package relies on: the rows of `contracts.toml`, and why some may be missing.

A row is a name that is imported, or a member of a class that is overridden, called, read or written, with its signature
or type in each supported version and the files that use it. `make contracts` writes the rows; people review the
changes. `make drift` compares them with another version.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "vllm_gaudi_ucm" / "vllm_api" / "contracts.toml"

CONDITIONS: dict[str, str] = {
    "vllm.v1.outputs.AsyncModelRunnerOutput.get_kv_connector_output": (
        "vLLM calls it if its class declares it; otherwise what our outputs define is not called"
    ),
}
"""Full names that some supported versions lack, and why the code runs without them.

A name needs no entry if the code shows it: by trying the import, by `hasattr`, or by a default of `getattr`.
"""

ACCEPTED: dict[str, str] = {}
"""Methods of this package that cannot take every call that the overridden method takes, and why none is made."""


@dataclass(frozen=True)
class Contract:
    """One name of vLLM that this package relies on.

    Args:
        name: full name of what is imported, or of the class that defines the member.
        member: empty for an imported name.
        what: signature, type or kind, one for each variant in a supported version.
        users: the ways of use, each with its files.
        is_optional: the code runs without it.
        instead: full names of alternatives, of which one is enough.
        defined: the place where an imported name is defined, if different.
    """

    name: str
    member: str
    what: tuple[str, ...]
    users: tuple[tuple[str, tuple[str, ...]], ...]
    is_optional: bool = False
    instead: tuple[str, ...] = ()
    defined: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.member

    @property
    def full_name(self) -> str:
        return f"{self.name}.{self.member}" if self.member else self.name


def load(file: Path = TABLE) -> dict[tuple[str, str], Contract]:
    """Returns all rows by name and member.

    Reason: vLLM does not tell which of its names are stable, so a new version is compared with the used ones.
    Remove when: all that the rows name is a documented extension point.
    """
    rows = tomllib.loads(file.read_text(encoding="utf-8"))
    contracts = (_contract(name, member, row) for name, members in rows.items() for member, row in members.items())
    return {contract.key: contract for contract in contracts}


def _contract(name: str, member: str, row: dict[str, Any]) -> Contract:
    users = tuple((how, tuple(files)) for how, files in row["by"].items())
    others = {key: tuple(row.get(key, ())) for key in ("instead", "defined")}
    return Contract(name, member, tuple(row["is"]), users, row.get("optional", False), **others)
