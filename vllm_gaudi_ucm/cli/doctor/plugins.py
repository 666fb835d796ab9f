"""Doctor's section on platform plugins: is ours found and active, does another compete, what does vLLM resolve."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points

from vllm_gaudi_ucm import PLATFORM_CLASS, envs, register
from vllm_gaudi_ucm.cli.doctor.check import Check, Status
from vllm_gaudi_ucm.cli.doctor.probe import GROUP, Probe
from vllm_gaudi_ucm.device.detect import decide

SECTION = "platform plugin"
OURS = "gaudi_ucm"


class PluginChecks:
    """Starts the child processes at once (they take seconds) and reports when asked."""

    def __init__(self) -> None:
        found = list(entry_points(group=GROUP))
        self.ours = [entry for entry in found if entry.name == OURS]
        self.rivals = {entry: Probe("plugin", entry.name, entry.value) for entry in found if entry.name != OURS}
        self.resolved = Probe("platform")
        self.active = False
        # Whether register() says by itself that the plugin should not be used here.
        self.stays_out = False
        self.active_rivals: list[str] = []

    def rows(self) -> Iterator[Check]:
        """The section's rows."""
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
            return Check(SECTION, "entry point", "ok", f"{OURS} = {found}")
        advice = "reinstall vllm-gaudi-ucm in this environment: pip install --force-reinstall --no-deps vllm-gaudi-ucm"
        return Check(SECTION, "entry point", "fail", found, f"{OURS}, once, in the group {GROUP}", advice)

    def _registered(self) -> Check:
        # Called bare: vLLM swallows what register() raises, and then silently takes another device.
        try:
            self.active = register() is not None
            reason = decide().reason
            self.stays_out = not self.active
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            return Check(SECTION, "register()", "fail", found, PLATFORM_CLASS, "vLLM would run without the plugin")
        if self.active:
            return Check(SECTION, "register()", "ok", f"active: {reason}")
        advice = f"set {envs.DEVICE} to hpu, cuda or cpu if the plugin should be used here"
        return Check(SECTION, "register()", "warn", f"not active: {reason}", PLATFORM_CLASS, advice)

    def _rival(self, entry: EntryPoint, probe: Probe) -> Check:
        origin = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
        name = f"other plugin {entry.name}{origin}"
        answer = probe.answer()
        if not _may_load(entry.name):
            return Check(SECTION, name, "info", "left out by VLLM_PLUGINS")
        if "error" in answer:
            return Check(SECTION, name, "warn", answer["error"], "no error", "vLLM ignores it; uninstall or repair it")
        if answer["value"] is None:
            return Check(SECTION, name, "info", "not active")
        self.active_rivals.append(entry.name)
        return Check(SECTION, name, "info", f"active: {answer['value']}")

    def _competition(self) -> Check:
        active = [OURS] * (self.active and _may_load(OURS)) + self.active_rivals
        found = ", ".join(active) or "none"
        if len(active) < 2:
            return Check(SECTION, "active plugins", "ok", found, "at most one")
        advice = f"vLLM raises at start: uninstall {', '.join(self.active_rivals)}, or set VLLM_PLUGINS={OURS}"
        return Check(SECTION, "active plugins", "fail", found, "at most one", advice)

    def _resolved(self) -> Check:
        answer = self.resolved.answer()
        found = answer.get("value") or f"error: {answer.get('error')}"
        if found == PLATFORM_CLASS:
            return Check(SECTION, "platform of vLLM", "ok", found)
        if self.stays_out and "error" not in answer:
            return Check(SECTION, "platform of vLLM", "warn", found, PLATFORM_CLASS, "see register() above")
        advice = "vLLM cannot use the plugin: see the rows above"
        if (envs.observed("VLLM_TARGET_DEVICE") or "").lower() == "cpu":
            advice = "unset VLLM_TARGET_DEVICE: with the value cpu vLLM asks no plugin at all"
        return Check(SECTION, "platform of vLLM", "fail", found, PLATFORM_CLASS, advice)


def _may_load(name: str) -> bool:
    allowed = envs.allowed_plugins()
    return allowed is None or name in allowed


def _allowed() -> Check:
    status: Status = "ok" if _may_load(OURS) else "fail"
    found = "unset: all plugins" if (value := envs.observed("VLLM_PLUGINS")) is None else repr(value)
    advice = "" if status == "ok" else f"add {OURS} to VLLM_PLUGINS, or unset it"
    return Check(SECTION, "VLLM_PLUGINS", status, found, f"unset, or a list with {OURS}", advice)
