"""Workers on two nodes of a Ray cluster give the tokens of one worker. Both nodes are on this machine, on loopback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.engine.contracts import v2_without_driver
from tests.engine.serving import TINY_OPTIONS, Engine, greedy_params
from tests.fork_server import ProcessOnCpu
from tests.warm_process import WarmProcess

# starts a cluster, whose workers import everything for themselves
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
# not 127.0.0.1, which Ray replaces by the machine's own address
ADDRESS = "127.0.0.2"
PROMPTS = [[(7 * i * i + 3 * j + 1) % 250 + 3 for j in range(20 + 13 * i)] for i in range(4)]
TOKENS = 16
WORKER = "tests.engine.environment_worker.EnvironmentWorker"
VARIABLES = {"PT_HPU_LAZY_MODE": "0", "HCCL_SOCKET_IFNAME": "lo", "VLLM_GAUDI_UCM_DEVICE": "cpu"}
"""Set for the engine alone, after the nodes have started."""


def serve_on_ray(model: str, result: str) -> None:
    """Tensor parallelism over two nodes, in a process of its own."""
    import ray
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {
        "num_cpus": 2,
        "num_gpus": 1,  # one worker
        "node_ip_address": ADDRESS,
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
        "no_monitor": True,
    }
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        os.environ.update(VARIABLES, RAY_ADDRESS=cluster.address)
        options = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "worker_extension_cls": WORKER}
        with v2_without_driver():
            llm = LLM(model=model, **{**TINY_OPTIONS, **options})
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy_params(TOKENS))
        seen = llm.collective_rpc("get_environment", args=(list(VARIABLES),))
        llm.llm_engine.engine_core.shutdown()
        found = {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "seen": seen}
        Path(result).write_text(json.dumps(found))
    finally:
        ray.shutdown()  # a node that has a driver is not shut down
        cluster.shutdown()


def test_two_nodes_give_the_tokens_of_one_worker(tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    with Engine(tiny_llama) as alone:
        expected = [answer.tokens for answer in alone.greedy(PROMPTS, TOKENS)]
    result, log = tmp_path / "result.json", tmp_path / "log"
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    env = kept | {
        # one process fewer that imports everything: to Ray this one is the driver
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": ADDRESS,
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"])),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray lowers the priority of its workers, who would wait for every other test
        "RAY_worker_niceness": "0",
        # no worker before one is asked for: those of the engine have an environment of their own, and use none of these
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
    }
    process = WarmProcess(
        serve_on_ray, (str(tiny_llama), str(result)), log=log, env=env, cwd=tmp_path, kind=ProcessOnCpu
    )
    assert process.finish(540) == 0, log.read_text(errors="replace")[-4000:]
    found = json.loads(result.read_text())
    assert found["tokens"] == expected
    assert found["seen"] == [VARIABLES, VARIABLES]
