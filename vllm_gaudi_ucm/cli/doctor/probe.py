"""Asks vLLM and its plugins questions in a process of their own, so that a crash there cannot take the doctor down."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

# Plugins and vLLM print as they like: the answer is the one line that starts with this.
_MARK = "gaudi-ucm-probe: "
GROUP = "vllm.platform_plugins"


class Probe:
    """A question under way in a child process."""

    def __init__(self, *question: str) -> None:
        command = [sys.executable, "-m", "vllm_gaudi_ucm.cli.doctor.probe", *question]
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def answer(self, timeout: float = 60.0) -> dict[str, Any]:
        """`{"value": ...}`, or `{"error": text}` where the child raised, died, or took over `timeout` seconds."""
        try:
            stdout, stderr = self._child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.communicate()
            return {"error": f"no answer within {timeout:.0f} s"}
        for line in stdout.splitlines():
            if line.startswith(_MARK):
                return dict(json.loads(line.removeprefix(_MARK)))
        last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "nothing on stderr")
        return {"error": f"the process ended with code {self._child.returncode}: {last}"}


def platform_of_vllm() -> str:
    """The dotted name of the platform class that vLLM resolves here and now."""
    from vllm.platforms import current_platform

    return f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"


def outcome_of_plugin(name: str, value: str) -> str | None:
    """What a platform plugin returns when called bare: a platform class's dotted name, or None."""
    outcome = EntryPoint(name, value, GROUP).load()()
    return None if outcome is None else str(outcome)


def main(question: Sequence[str]) -> int:
    """The child's side: prints the marked answer, also where the question raised."""
    try:
        value = platform_of_vllm() if question[0] == "platform" else outcome_of_plugin(*question[1:])
        answer: dict[str, Any] = {"value": value}
    except Exception as error:
        # Not swallowed: it is the answer, and the doctor shows it.
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
