"""Kills serving processes, and checks that their callers get an error within 30 s. For two GPUs, or the CPU.

device: a device-side assert on rank 1 of 2 while the next step is queued; the caller of `LLM` gets an error, and the
log names the rank and the reason. On the CPU the assert is simulated, and rank 0 waits as in a collective.
engine: the engine's process is killed under `LLM`; the error tells it.
server: rank 1 of 2 is killed under a server; it ends with a status that is not 0, and leaves no process.
Needs no network and no model file. Prints a line for each case; ends with 1 if one is wrong.
usage: VLLM_GAUDI_UCM_DEVICE=cuda python scripts/check_device_deaths.py [--cases device,engine,server]
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

VOCABULARY = 256
LENGTH = 4096
SECONDS = 30
# until the last process that serves a server, such as multiprocessing's tracker, has noticed its end
CLEAN_SECONDS = 10
# to import, load and warm up, on a machine that runs other programs as well
START_SECONDS = 400
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": LENGTH, "max_num_seqs": 4}
CACHE = 64 << 20
UCM: dict[str, Any] = {"scheduler": {"async_scheduling": True}, "graphs": {"max_graphs": 4}}
FAILED = re.compile(r"rank 1 of 2 \(process \d+\) failed .*")
RESULT = "result.json"


class BrokenFence:
    """A place in the device's work that it does not reach, because it has failed before."""

    def wait(self) -> None:
        """Nothing waits for it here."""

    def query(self) -> bool:
        raise RuntimeError("simulated device-side assert")


class FailingWorker:
    """Methods that vLLM adds to the worker (`worker_extension_cls`)."""

    rank: int
    _steps: Any
    _device: Any

    def fail_behind_a_step(self, rank: int, steps: int) -> None:
        """Makes the device of this rank fail after this many steps, while its host continues."""
        if self._device.kind == "cpu":
            self._count(steps, self._break_fence if self.rank == rank else _wait_for_ever)
        elif self.rank == rank:
            self._count(steps, _assert_on_the_device)

    def _count(self, steps: int, fail: Callable[[], None]) -> None:
        sample, left = self._steps.sample_tokens, [steps]

        def sample_tokens(grammar: Any) -> Any:
            output = sample(grammar)
            left[0] -= 1
            if left[0] == 0:
                fail()
            return output

        self._steps.sample_tokens = sample_tokens

    def _break_fence(self) -> None:
        self._device.fence = BrokenFence


def _assert_on_the_device() -> None:
    """Queued; the host does not wait for it."""
    numbers = torch.zeros(4, device="cuda")
    numbers[torch.full((1,), 1 << 20, device="cuda")] = 1.0


def _wait_for_ever() -> None:
    threading.Event().wait()


def make_model(folder: Path) -> None:
    """A small random Llama, and a tokenizer that has a word for each of its tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(folder)


def lose_device(llm: Any) -> None:
    """Before requests run."""
    llm.collective_rpc("fail_behind_a_step", args=(1, 20))


def kill_engine(llm: Any) -> None:
    """While requests run."""
    (engine,) = [child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")]
    threading.Timer(2.0, engine.kill).start()


FAULTS: dict[str, tuple[int, Callable[[Any], None]]] = {"device": (2, lose_device), "engine": (1, kill_engine)}


def serve_offline(case: str, folder: Path) -> dict[str, Any]:
    """Runs in a process of its own; returns the error that the caller gets, and the seconds until then."""
    from vllm import LLM, SamplingParams, TokensPrompt

    workers, fault = FAULTS[case]
    llm = LLM(
        str(folder),
        tensor_parallel_size=workers,
        kv_cache_memory_bytes=CACHE,
        worker_extension_cls="check_device_deaths.FailingWorker",
        additional_config={"ucm": UCM},
        **OPTIONS,
    )
    fault(llm)
    params = SamplingParams(temperature=0, max_tokens=LENGTH - 8, ignore_eos=True, detokenize=False)
    begin = time.monotonic()
    error = "none"
    try:
        while time.monotonic() - begin < SECONDS:
            llm.generate([TokensPrompt(prompt_token_ids=[5, 9, 31])] * 4, params, use_tqdm=False)
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    return {"error": error, "seconds": time.monotonic() - begin}


def _environment() -> dict[str, str]:
    here = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH"))))
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return {**os.environ, **offline, "PYTHONPATH": here}


def _members(session: int) -> list[psutil.Process]:
    """Processes of a session that have not ended."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(one.pid) == session and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def _end(process: subprocess.Popen[bytes], seconds: float = 0.0) -> list[str]:
    """Ends the processes of a session that have not ended by themselves after this many seconds; returns their ids."""
    deadline = time.monotonic() + seconds
    while (left := _members(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.wait()
    return [str(one.pid) for one in left]


def check_offline(case: str, folder: Path, log: Path) -> str:
    """Returns the fault, or a sentence that begins with "ok"."""
    result = folder / RESULT
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--serve", case, str(folder)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(), start_new_session=True)
        try:
            process.wait(START_SECONDS + 2 * SECONDS)
        except subprocess.TimeoutExpired:
            return f"no end {START_SECONDS + 2 * SECONDS} s after the start"
        finally:
            _end(process)
    if not result.exists():
        return f"no result; the process ended with status {process.returncode}"
    found = json.loads(result.read_text())
    error, seconds = found["error"], found["seconds"]
    if error == "none" or seconds > SECONDS:
        return f"the caller got the error {error!r} after {seconds:.0f} s, expected one within {SECONDS} s"
    if case == "engine":
        return f"ok: {error} after {seconds:.1f} s" if "SIGKILL" in error else f"the error has no reason: {error}"
    reason = FAILED.search(log.read_text(errors="replace"))
    return f"ok: {error} after {seconds:.1f} s; {reason[0]}" if reason else f"the log has no rank and reason: {error}"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _ask(url: str) -> None:
    body = {"model": "model", "prompt": [5, 9, 31], "max_tokens": LENGTH - 8, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    # which is its end
    with contextlib.suppress(urllib.error.URLError, OSError):
        urllib.request.urlopen(request, timeout=START_SECONDS).close()


def check_server(folder: Path, log: Path) -> str:
    """Returns the fault, or a sentence that begins with "ok"."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--served-model-name", "model"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--tensor-parallel-size", "2"]
    command += ["--kv-cache-memory-bytes", str(CACHE), "--additional-config", json.dumps({"ucm": UCM})]
    command += [text for name, value in OPTIONS.items() for text in ("--" + name.replace("_", "-"), str(value))]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(), start_new_session=True)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    return f"the server did not start (status {process.poll()})"
                time.sleep(0.5)
            threading.Thread(target=_ask, args=(url,), daemon=True).start()
            time.sleep(2.0)
            worker = re.search(r"Worker_TP1 pid=(\d+)", log.read_text(errors="replace"))
            if worker is None:
                return "the log names no Worker_TP1"
            begin = time.monotonic()
            os.kill(int(worker[1]), signal.SIGKILL)
            status = process.wait(2 * SECONDS)
            seconds = time.monotonic() - begin
        except subprocess.TimeoutExpired:
            return f"the server runs {2 * SECONDS} s after rank 1 was killed"
        finally:
            left = _end(process, CLEAN_SECONDS)
    if status == 0 or seconds > SECONDS or left:
        return f"status {status} after {seconds:.1f} s, expected another than 0 within {SECONDS} s; left: {left}"
    return f"ok: status {status} after {seconds:.1f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each case; 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=2, metavar=("CASE", "FOLDER"), help="the process of one case")
    parser.add_argument("--cases", default="device,engine,server", help="cases (default: %(default)s)")
    parser.add_argument("--logs", metavar="FOLDER", help="keeps the log of each case")
    options = parser.parse_args(argv)
    if options.serve:
        case, folder = options.serve
        (Path(folder) / RESULT).write_text(json.dumps(serve_offline(case, Path(folder))))
        # the engine is gone, and its client has nothing to close
        os._exit(0)
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = Path(options.logs) if options.logs else folder
        logs.mkdir(parents=True, exist_ok=True)
        make_model(folder)
        for case in options.cases.split(","):
            log = logs / f"{case}.log"
            found = check_server(folder, log) if case == "server" else check_offline(case, folder, log)
            print(f"{case}: {found}", flush=True)
            if not found.startswith("ok"):
                wrong += 1
                print("\n".join(log.read_text(errors="replace").splitlines()[-60:]), file=sys.stderr, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
