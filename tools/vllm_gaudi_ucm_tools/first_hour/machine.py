"""Records before the probes: the card's own report, software, build of torch, allowed environment variables."""

from __future__ import annotations

import platform
import shutil
import subprocess
from typing import Any

from vllm_gaudi_ucm import __version__, envs
from vllm_gaudi_ucm_tools.first_hour.result import Ending

TOOLS = ("hl-smi", "nvidia-smi")
TOOL_LIMIT_S = 30


def describe(ending: Ending) -> dict[str, Any]:
    """Describes the machine. ending: of the process that reads values which need an import; values that it could not
    read are missing.
    """
    found = {event["name"]: event["value"] for event in ending.events if event["kind"] == "note"}
    end = next((event for event in ending.events if event["kind"] == "end"), None)
    failed = end is None or end["status"] != "done"
    return {
        "plugin": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": platform.machine(),
        **found,
        "environment": envs.reportable(),
        "tools": {name: text for name in TOOLS if (text := _tool(name)) is not None},
        "failure": "" if not failed else f"{'' if end is None else end['text']}\n{ending.log}".strip(),
    }


def _tool(name: str) -> str | None:
    """Returns a tool's output; None if it is not installed."""
    path = shutil.which(name)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path], capture_output=True, text=True, errors="replace", timeout=TOOL_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"({error})"
    return (done.stdout + done.stderr)[:20_000]
