"""Environment variables; no other file of the package reads any."""

import os
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path

DEVICE = "VLLM_GAUDI_UCM_DEVICE"
# set by a server for its engines, never by people, so it is none of the variables that vLLM checks (VLLM_...)
LOCAL_ENGINES = "GAUDI_UCM_LOCAL_ENGINES"
_NAME = "vllm-gaudi-ucm"  # our folder in the user's cache
DEVICE_CHOICES = ("auto", "hpu", "cuda", "cpu")
KERNELS = "VLLM_GAUDI_UCM_KERNELS"
BUILD_KERNELS = "build"
KERNEL_CHOICES = ("auto", BUILD_KERNELS)

# Variables of other software that affect us. The doctor shows them.
OBSERVED: Mapping[str, str] = {
    "VLLM_PLUGINS": "comma separated names of the vLLM plugins that may be loaded; unset: all",
    "VLLM_TARGET_DEVICE": "vLLM takes its own CPU platform without asking any plugin where this is `cpu`",
    "OMP_NUM_THREADS": "OpenMP threads of torch on the CPU; unset: one per core",
    "GOMP_SPINCOUNT": "how long idle OpenMP threads keep their cores; unset: on a shared machine 500 for each core",
    "OMP_WAIT_POLICY": "`passive` or `active` waiting of idle OpenMP threads, in place of GOMP_SPINCOUNT",
    "KMP_BLOCKTIME": "milliseconds that idle threads of Intel's OpenMP keep their cores",
    "THP_MEM_ALLOC_ENABLE": "`1` lets torch take transparent huge pages for its CPU buffers",
    "HABANA_VISIBLE_MODULES": "Gaudi cards that this process may use; unset: all",
    "PT_HPU_LAZY_MODE": "`1`: Gaudi's lazy mode, on the vendor's torch only; unset or `0`: eager with torch.compile",
    "QUANT_CONFIG": "how --quantization inc quantises by ranges that were measured: a file of Intel Neural Compressor",
    "XDG_CACHE_HOME": "folder of the user's caches, ours (kernels, fits of attention) among them; unset: ~/.cache",
    "PROMETHEUS_MULTIPROC_DIR": "folder of files from which /metrics is answered; vLLM sets it for several API servers",
}


def device_choice() -> str:
    """Returns the chosen device: one of `DEVICE_CHOICES`, `auto` if the variable is unset or empty."""
    return _choice(DEVICE, DEVICE_CHOICES)


def kernel_choice() -> str:
    """Returns which native CPU kernels are chosen: one of `KERNEL_CHOICES`, `auto` if the variable is unset or empty.

    `auto`: from the wheel, or built here if it has none for this CPU. `build`: built here, for this very CPU.
    """
    return _choice(KERNELS, KERNEL_CHOICES)


def _choice(name: str, choices: Collection[str]) -> str:
    found = os.environ.get(name, "").strip()
    choice = found.lower() or "auto"
    if choice not in choices:
        raise ValueError(
            f"environment variable {name}: found {found!r}, expected one of {', '.join(choices)}; "
            "correct it, or unset it to let the plugin choose"
        )
    return choice


def observed(name: str) -> str | None:
    """The value of a variable listed in `OBSERVED`, None if it is unset."""
    if name not in OBSERVED:
        raise KeyError(f"{name} is not declared in vllm_gaudi_ucm.envs.OBSERVED")
    return os.environ.get(name)


def lazy_mode() -> bool:
    """True if Gaudi's bridge accumulates operators; by default it runs them eagerly and compiles with torch.compile.

    Source: the vendor's documentation, Runtime Flags.
    """
    return observed("PT_HPU_LAZY_MODE") not in (None, "", "0")


def multi_process_metrics() -> Path | None:
    """The folder from whose files /metrics is answered, None if one API server answers from its own process."""
    found = observed("PROMETHEUS_MULTIPROC_DIR")
    return Path(found) if found else None


def user_cache() -> Path:
    """Our folder in the user's cache, for files that can be made again: in `XDG_CACHE_HOME`, or `~/.cache`.

    Raises RuntimeError if there is none, or if its path is relative: it would depend on the folder that a server is
    started in.
    """
    cache = observed("XDG_CACHE_HOME")
    if cache:
        return _absolute("XDG_CACHE_HOME", cache) / _NAME
    return _absolute("HOME", os.environ.get("HOME", os.path.expanduser("~"))) / ".cache" / _NAME


def _absolute(name: str, found: str) -> Path:
    if not os.path.isabs(found):
        shown = repr(found) if name in os.environ else "nothing, and no home folder of this user"
        raise RuntimeError(
            f"environment variable {name}: found {shown}, expected the absolute path of a folder; set it, or "
            "XDG_CACHE_HOME, to a folder that this user may write to"
        )
    return Path(found)


def environment_without(names: Collection[str]) -> dict[str, str]:
    """The variables of this process without these, for a child process."""
    return {name: value for name, value in os.environ.items() if name not in names}


def allowed_plugins() -> tuple[str, ...] | None:
    """The plugin names that `VLLM_PLUGINS` lets vLLM load, None if it lets it load all."""
    found = observed("VLLM_PLUGINS")
    return None if found is None else tuple(found.split(","))


def merge_into_vllm() -> None:
    """Adds our variables to vLLM's registry, so that its start-up check does not call them unknown.

    `vllm.platforms.interface.Platform.validate_environ` warns about (or, with `--fail-on-environ-validation`, refuses)
    every `VLLM_*` variable that the registry does not hold. Safe to call more than once.
    """
    import vllm.envs

    vllm.envs.environment_variables.setdefault(DEVICE, device_choice)
    vllm.envs.environment_variables.setdefault(KERNELS, kernel_choice)


def announce_local_engines(count: int) -> None:
    """Announces to the engines that this process starts how many run on this machine."""
    os.environ[LOCAL_ENGINES] = str(count)


# of Gaudi's software and of gloo, and ours; vLLM copies its own, and NCCL's
_FOR_RAY = ("PT_HPU_", "HCCL_", "GLOO_", "GAUDI_UCM_")


def copy_to_ray_engines() -> None:
    """Lets vLLM copy the variables that an engine on another machine needs; names chosen by the user stay."""
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    asked = [prefix.strip() for prefix in os.environ.get(name, "").split(",") if prefix.strip()]
    os.environ[name] = ",".join(dict.fromkeys([*asked, *_FOR_RAY]))


# how idle threads of OpenMP wait, which it reads when it is loaded
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
_ENVIRONMENT_OF_START = Path("/proc/self/environ")


SPINS_OF_A_CORE = 500


def let_idle_threads_wait_briefly(cores: int) -> None:
    """Lets idle OpenMP threads of processes that this one starts give up their cores soon; a user's own choice stays.

    By default they spin for milliseconds. On a machine with other work that takes the core from the very thread they
    wait for, hundreds of times a step. How long a wait is worth it grows with the `cores` that compute: sleeping
    threads are woken one after the other.
    """
    if not waiting_is_chosen():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS_OF_A_CORE * cores)


def waiting_is_chosen() -> bool:
    """Returns whether a variable decides how idle OpenMP threads wait: the user's choice, or an earlier one of ours."""
    return any(name in os.environ for name in _WAITING)


def waiting_at_start() -> dict[str, str]:
    """Returns the settings of waiting with which this process's OpenMP started."""
    try:
        pairs = _ENVIRONMENT_OF_START.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}  # not Linux
    found = dict(pair.partition("=")[::2] for pair in pairs)
    return {name: found[name] for name in _WAITING if name in found}


def users_threads() -> str | None:
    """`OMP_NUM_THREADS` if the user has set it; vLLM sets it for processes that it starts, and marks that."""
    by_vllm = os.environ.get("VLLM_OMP_NUM_THREADS_SET_BY_VLLM") == "1"
    return None if by_vllm else observed("OMP_NUM_THREADS")


# decided while a process imports the plugin, or before
_OF_IMPORT = (DEVICE, "VLLM_PLUGINS", *_WAITING)


def needed_to_import() -> dict[str, str]:
    """The variables that a worker on another machine must have before it imports anything."""
    return {name: os.environ[name] for name in _OF_IMPORT if name in os.environ}


def local_engines() -> int:
    """Returns the number of engines of one server on this machine, including this process; 1 if unknown."""
    found = os.environ.get(LOCAL_ENGINES, "")
    return max(1, int(found)) if found.isdigit() else 1


def use_hpu_recipe_cache(folder: Path) -> None:
    """Lets Gaudi's bridge keep recipes in `folder` over starts, up to 10 GB; a value set by the user stays."""
    os.environ.setdefault("PT_HPU_RECIPE_CACHE_CONFIG", f"{folder},False,10240")


def use_inductor_cache(folder: Path) -> None:
    """Lets inductor keep compiled graphs in `folder`; a value set by the user stays."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def hpu_recipe_cache() -> Path | None:
    """The folder that a variable of the user gives to Gaudi's bridge."""
    found = os.environ.get("PT_HPU_RECIPE_CACHE_CONFIG", "").partition(",")[0]
    return Path(found) if found else None


def inductor_cache() -> Path | None:
    """The folder that a variable of the user gives to inductor."""
    found = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(found) if found else None


def spawn_workers(even_if_asked_to_fork: bool) -> bool:
    """Makes vLLM spawn processes instead of forking them. Returns whether it will.

    A user's own choice stays, unless `even_if_asked_to_fork`.
    """
    if even_if_asked_to_fork:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn") == "spawn"


def ask_for_v1_messages() -> None:
    """Has vLLM's scheduler send messages in the form of its V1 runner, on every device; a user's own choice stays."""
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def wait_for_engines_end(seconds: int) -> None:
    """Seconds that a script waits for its engine to end, instead of five; a user's own value stays."""
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(seconds))


# Variables that a report may show: how torch, Gaudi's software and this plugin are set up.
REPORTED = ("PT_*", "HABANA*", "HLS_*", "HCCL_*", "VLLM_GAUDI_UCM*", "TORCHINDUCTOR_*", "FUSER_*", "OMP_NUM_THREADS")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL", "AUTH", "COOKIE")


def reportable() -> dict[str, str]:
    """The variables that a report may show, by `REPORTED`; none whose name sounds like a secret."""
    shown = {name: value for name, value in os.environ.items() if any(fnmatch(name, one) for one in REPORTED)}
    return {name: value for name, value in sorted(shown.items()) if not _is_secret(name)}


def secrets() -> set[str]:
    """Returns the values of variables whose names sound like secrets, which reports must not contain."""
    return {value for name, value in os.environ.items() if _is_secret(name) and value}


def _is_secret(name: str) -> bool:
    return any(word in name.upper() for word in _SECRET)
