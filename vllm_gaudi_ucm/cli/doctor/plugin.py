"""Doctor's section on the platform plugin: whether vLLM finds it, loads it and takes it.

Run as a module it is the child process of a `Probe`: a question to vLLM or to another plugin, which may crash.
"""

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vllm_gaudi_ucm import PLATFORM_CLASS, envs, register
from vllm_gaudi_ucm.cli.doctor.check import Check, Status
from vllm_gaudi_ucm.cli.doctor.child import ending_of, start
from vllm_gaudi_ucm.device.detect import decide

PLUGIN = "platform plugin"
OURS = "gaudi_ucm"
# Plugins and vLLM print as they like: the answer is the one line that starts with this.
_MARK = "gaudi-ucm-probe: "
GROUP = "vllm.platform_plugins"


class Probe:
    """A question under way in a child process."""

    def __init__(self, *question: str) -> None:
        self._child = start("vllm_gaudi_ucm.cli.doctor.plugin", *question)

    def answer(self, timeout: float = 60.0) -> dict[str, Any]:
        """Returns `{"value": ...}`, or `{"error": text}` if the child raised, died, or took over `timeout` seconds."""
        ending = ending_of(self._child, timeout)
        if ending.stdout is None:
            return {"error": f"no answer within {timeout:.0f} s"}
        for line in ending.stdout.splitlines():
            if line.startswith(_MARK):
                return dict(json.loads(line.removeprefix(_MARK)))
        return {"error": f"the process {ending.how}"}


class PluginChecks:
    """Starts the child processes at once (they take seconds) and reports when asked."""

    def __init__(self) -> None:
        found = list(entry_points(group=GROUP))
        self.ours = [entry for entry in found if entry.name == OURS]
        self.rivals = {entry: Probe("plugin", entry.name, entry.value) for entry in found if entry.name != OURS}
        self.resolved = Probe("platform")
        self.active = False
        # Whether register() decided that the plugin is not to be used here.
        self.stays_out = False
        self.active_rivals: list[str] = []

    def rows(self) -> Iterator[Check]:
        yield self._found()
        yield _allowed()
        yield self._registered()
        for entry, probe in self.rivals.items():
            yield self._rival(entry, probe)
        yield self._competition()
        yield self._resolved()

    def _found(self) -> Check:
        found = ", ".join(entry.value for entry in self.ours) or "no such entry point"
        if len(self.ours) == 1:
            return Check(PLUGIN, "entry point", "ok", f"{OURS} = {found}")
        advice = "reinstall vllm-gaudi-ucm in this environment: pip install --force-reinstall --no-deps vllm-gaudi-ucm"
        return Check(PLUGIN, "entry point", "fail", found, f"{OURS}, once, in the group {GROUP}", advice)

    def _registered(self) -> Check:
        # Called bare: vLLM swallows exceptions of register(), and then silently takes another device.
        try:
            self.active = register() is not None
            reason = decide().reason
            self.stays_out = not self.active
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            return Check(PLUGIN, "register()", "fail", found, PLATFORM_CLASS, "vLLM would run without the plugin")
        if self.active:
            return Check(PLUGIN, "register()", "ok", f"active: {reason}")
        advice = f"set {envs.DEVICE} to hpu, cuda or cpu if the plugin should be used here"
        return Check(PLUGIN, "register()", "warn", f"not active: {reason}", PLATFORM_CLASS, advice)

    def _rival(self, entry: EntryPoint, probe: Probe) -> Check:
        origin = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
        name = f"other plugin {entry.name}{origin}"
        answer = probe.answer()
        if not _may_load(entry.name):
            return Check(PLUGIN, name, "info", "left out by VLLM_PLUGINS")
        if "error" in answer:
            return Check(PLUGIN, name, "warn", answer["error"], "no error", "vLLM ignores it; uninstall or repair it")
        if answer["value"] is None:
            return Check(PLUGIN, name, "info", "not active")
        self.active_rivals.append(entry.name)
        return Check(PLUGIN, name, "info", f"active: {answer['value']}")

    def _competition(self) -> Check:
        active = [OURS] * (self.active and _may_load(OURS)) + self.active_rivals
        found = ", ".join(active) or "none"
        if len(active) < 2:
            return Check(PLUGIN, "active plugins", "ok", found, "at most one")
        advice = f"vLLM raises at start: uninstall {', '.join(self.active_rivals)}, or set VLLM_PLUGINS={OURS}"
        return Check(PLUGIN, "active plugins", "fail", found, "at most one", advice)

    def _resolved(self) -> Check:
        answer = self.resolved.answer()
        found = answer.get("value") or f"error: {answer.get('error')}"
        if found == PLATFORM_CLASS:
            return Check(PLUGIN, "platform of vLLM", "ok", found)
        if self.stays_out and "error" not in answer:
            return Check(PLUGIN, "platform of vLLM", "warn", found, PLATFORM_CLASS, "see register() above")
        advice = "vLLM cannot use the plugin: see the rows above"
        if (envs.observed("VLLM_TARGET_DEVICE") or "").lower() == "cpu":
            advice = "unset VLLM_TARGET_DEVICE: with the value cpu vLLM does not load any platform plugin"
        return Check(PLUGIN, "platform of vLLM", "fail", found, PLATFORM_CLASS, advice)


def _may_load(name: str) -> bool:
    allowed = envs.allowed_plugins()
    return allowed is None or name in allowed


def _allowed() -> Check:
    status: Status = "ok" if _may_load(OURS) else "fail"
    found = "unset: all plugins" if (value := envs.observed("VLLM_PLUGINS")) is None else repr(value)
    advice = "" if status == "ok" else f"add {OURS} to VLLM_PLUGINS, or unset it"
    return Check(PLUGIN, "VLLM_PLUGINS", status, found, f"unset, or a list with {OURS}", advice)


def platform_of_vllm() -> str:
    """The dotted name of the platform class that vLLM resolves here and now."""
    from vllm.platforms import current_platform

    return f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"


def outcome_of_plugin(name: str, value: str) -> str | None:
    """Returns the result of a platform plugin when called directly: a platform class's dotted name, or None."""
    outcome = EntryPoint(name, value, GROUP).load()()
    return None if outcome is None else str(outcome)


def main(question: Sequence[str]) -> int:
    """The child's side: prints the marked answer, even after an exception."""
    # It imports, and ends: collections would look at all that again and again, a seventh of the time, for no garbage.
    gc.disable()
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
