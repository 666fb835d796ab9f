"""Objects are complete when they are made: no module sets an attribute of an object of another module's class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, sources

EXCEPTIONS = {
    "vllm_gaudi_ucm/vllm_api/draft_heads.py": "a head of vLLM takes its weights so",
    # objects of vLLM that it gives plugins to change, or that have no other way
    "vllm_gaudi_ucm/connector/lmcache_connector.py": "parameters of vLLM's requests, and LMCache's adapter",
    "vllm_gaudi_ucm/connector/nixl_connector.py": "vLLM's configuration",
    "vllm_gaudi_ucm/connector/transfer_config.py": "vLLM's configuration",
    "vllm_gaudi_ucm/execution/regions.py": "the forward of vLLM's layers, which is compiled",
    "vllm_gaudi_ucm/layers/experts.py": "weights of vLLM's layers, which are packed elsewhere",
    "vllm_gaudi_ucm/layers/cpu/packed_weights.py": "the linear method of vLLM's layers",
    "vllm_gaudi_ucm/lora/joined_layers.py": "weight and linear method of vLLM's layers",
    "vllm_gaudi_ucm/layers/quantised/formats.py": "what vLLM's loader reads of its layers and parameters",
    "vllm_gaudi_ucm/layers/quantised/method.py": "weights and linear method of vLLM's layers",
    "vllm_gaudi_ucm/platform/platform.py": "vLLM's configuration",
    "vllm_gaudi_ucm/platform/quantised_weights.py": "vLLM's configuration",
    "vllm_gaudi_ucm/platform/refused_calls.py": "names of functions made here",
    "vllm_gaudi_ucm/platform/worker.py": "vLLM's configuration",
    "vllm_gaudi_ucm/start/model_runner.py": "vLLM's configuration",
    "vllm_gaudi_ucm/start/served_layers.py": "vLLM's configuration",
    "vllm_gaudi_ucm/scheduler/scheduler_class.py": "vLLM's configuration",
    "vllm_gaudi_ucm/vllm_api/attention.py": "the weight of a linear layer of vLLM's",
    "vllm_gaudi_ucm/vllm_api/blocks.py": "requests of vLLM's scheduler",
    "vllm_gaudi_ucm/vllm_api/engine_process.py": "vLLM's configuration",
    "vllm_gaudi_ucm/vllm_api/loading.py": "methods of loaders, models and weights, which it gives back; configurations",
    "vllm_gaudi_ucm/vllm_api/lora.py": "the matrices of vLLM's layers with adapters",
    "vllm_gaudi_ucm/vllm_api/model.py": "the class of vLLM's attention layers",
    "vllm_gaudi_ucm/vllm_api/moe.py": "the class of vLLM's routers",
    "vllm_gaudi_ucm/vllm_api/nixl.py": "the worker of vLLM's connector",
    "vllm_gaudi_ucm/vllm_api/platforms.py": "vLLM's configuration",
    "vllm_gaudi_ucm/vllm_api/sampling.py": "a method of vLLM's sampler",
    "vllm_gaudi_ucm/speculation/draft_model.py": "a copy of vLLM's configuration",
    "vllm_gaudi_ucm/runner/parts.py": "the output that vLLM's scheduler reads",
    "vllm_gaudi_ucm/runner/pooling.py": "the output that vLLM's scheduler reads",
    # objects of other libraries
    "graphs/runners/compiled.py": "torch's configuration",
    "vllm_gaudi_ucm/logger.py": "a record of logging, in a filter",
    "ops/cpu/native/library.py": "types of C functions",
    "ops/cuda/side_by_side.py": "a hook of Triton's, which it gives back",
    "ops/block_selection/impl/cpu/native.py": "the arguments of a C function",
    "ops/unified_attention/impl/cpu/native.py": "the arguments of a C function",
    "tools/vllm_gaudi_ucm_tools/sparse_report/recall.py": "hooks of a method that a report watches, and gives back",
    "ops/cpu/native/call_graph/memory.py": "flag of a finalizer",
    "vllm_gaudi_ucm/kv_cache/allocation.py": "types of a C function",
    "vllm_gaudi_ucm/prefetch/engine.py": "flag of a finalizer",
    # places of a thread, which has its own
    "tools/vllm_gaudi_ucm_tools/recipes/recorder.py": "threading.local",
    "ops/cuda/side_streams.py": "threading.local",
    "vllm_gaudi_ucm/device/cuda.py": "threading.local",
    "vllm_gaudi_ucm/device/hpu.py": "threading.local",
    "vllm_gaudi_ucm/store/guarded.py": "threading.local",
}
"""File to what it sets."""


def foreign_attributes(source: str) -> Iterator[str]:
    """Attributes that are assigned to objects which are neither `self` nor `cls`, nor made by a class in the same
    function, and that no class of the module declares.

    Adding to a counter is no assignment: `totals.saved += 1` is what totals are for.
    """
    tree = ast.parse(source)
    declared = set(_declared(tree))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            made = {"self", "cls"} | set(_made_in(function))
            for target in _assigned_in(function):
                base = target.value
                is_made = isinstance(base, ast.Name) and base.id in made
                if not is_made and target.attr not in declared:
                    yield ast.unparse(target)


def _declared(tree: ast.Module) -> Iterator[str]:
    """Fields, class attributes, and what methods set of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                targets = [line.target] if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [])
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.FunctionDef):
            for target in _assigned_in(node):
                if isinstance(target.value, ast.Name) and target.value.id == "self":
                    yield target.attr


def _assignments(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Targets and what they are assigned; tuples taken apart."""
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign):
            yield node.target, node.value
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    yield one, node.value


def _assigned_in(function: ast.FunctionDef) -> Iterator[ast.Attribute]:
    yield from (target for target, _ in _assignments(function) if isinstance(target, ast.Attribute))


def _made_in(function: ast.FunctionDef) -> Iterator[str]:
    """Names of objects that a class makes here: `name = Class(...)`, `name = Class.of(...)`."""
    for target, value in _assignments(function):
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            path = ast.unparse(value.func).split(".")
            if any(part.lstrip("_")[:1].isupper() for part in path):
                yield target.id


def test_what_counts_as_foreign() -> None:
    found = foreign_attributes(
        "class Own:\n"
        "    field: int = 0\n"
        "    def __init__(self): self.mine = 1\n"
        "    def change(self, own, other):\n"
        "        made = Made()\n"
        "        made.anything = own.field = own.mine = 2\n"
        "        other.count += 1\n"
        "        other.callback, self.x.y = print, 3\n"
    )
    assert sorted(found) == ["other.callback", "self.x.y"]


FILES = [file for _, file in sources()]


def foreign_in(file: Path) -> list[str]:
    return sorted(set(foreign_attributes(file.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_objects_are_complete_when_made(file: Path) -> None:
    name = str(file.relative_to(ROOT))
    if name not in EXCEPTIONS:
        found = foreign_in(file)
        assert not found, (
            f"{name} sets {found}; give it to the constructor, or let a method of the object's class set it"
        )


def test_the_lists_name_only_files_that_need_it() -> None:
    there = {str(file.relative_to(ROOT)): file for file in FILES}
    assert not {name for name in EXCEPTIONS if name not in there or not foreign_in(there[name])}


PROBES = {
    "vllm_gaudi_ucm/vllm_api/draft_heads.py": "a model of vLLM and its configuration, of any family",
    "vllm_gaudi_ucm/execution/regions.py": "a layer of vLLM's models, of any kind",
    "vllm_gaudi_ucm/vllm_api/attention.py": "a configuration of quantised weights of vLLM, of any kind",
    "vllm_gaudi_ucm/vllm_api/cache_options.py": "a module of vLLM, of any supported version",
    "vllm_gaudi_ucm/vllm_api/platforms.py": "a module of vLLM, of any supported version",
    "vllm_gaudi_ucm/vllm_api/model.py": "a layer of vLLM's, of any kind",
    "vllm_gaudi_ucm/vllm_api/steps.py": "a message of vLLM's scheduler, of any supported version",
    "vllm_gaudi_ucm/vllm_api/grid_encoder.py": "an encoder of pictures of vLLM, of any kind",
    "vllm_gaudi_ucm/vllm_api/patch_encoder.py": "an encoder of pictures of vLLM, of any kind",
    "vllm_gaudi_ucm/vllm_api/soft_token_encoder.py": "an encoder of pictures of vLLM, of any kind",
    "vllm_gaudi_ucm/vllm_api/child_watch.py": "a client of vLLM that may be half made, and its manager, of two kinds",
    "vllm_gaudi_ucm/vllm_api/engine_process.py": "a signal handler of any kind",
    "vllm_gaudi_ucm/vllm_api/server_end.py": "a signal handler of any kind",
    "tools/vllm_gaudi_ucm_tools/demo/engine.py": "a tokenizer of transformers",
    "vllm_gaudi_ucm/connector/setup.py": "a KV cache spec of vLLM",
    "vllm_gaudi_ucm/device/cuda.py": "threading.local",
    "vllm_gaudi_ucm/device/host_limits.py": "what the system's Python has",
    "vllm_gaudi_ucm/device/shared_machine.py": "what the system's Python has",
    "tools/vllm_gaudi_ucm_tools/first_hour/probes/cards.py": "a function of torch, of any supported version",
    "vllm_gaudi_ucm/device/hpu.py": "threading.local, and an enumeration of Gaudi's software",
    "vllm_gaudi_ucm/layers/cpu/packed_weights.py": "a layer of torch",
    "vllm_gaudi_ucm/lora/joined_layers.py": "a layer of vLLM's, of several kinds",
    "vllm_gaudi_ucm/kv_cache/allocation.py": "a KV cache spec of vLLM",
    "vllm_gaudi_ucm/memory_mode/options.py": "known: options of any store should say what bounds it",
    "vllm_gaudi_ucm/options/errors.py": "annotations of types",
    "vllm_gaudi_ucm/platform/checks.py": "parameters of requests of vLLM, of several kinds",
    "vllm_gaudi_ucm/platform/features.py": "a configuration of transformers",
    "vllm_gaudi_ucm/protocol/attachments.py": "outputs of vLLM, which carry what we attach",
    "vllm_gaudi_ucm/store/guarded.py": "threading.local",
    "vllm_gaudi_ucm/vllm_api/kv_cache.py": "a KV cache spec of vLLM",
    "vllm_gaudi_ucm/vllm_api/loading.py": "models, layers, weights and loaders of vLLM, and configurations",
    "vllm_gaudi_ucm/vllm_api/start_signals.py": "any handler of a signal",
    "graphs/strategies/file.py": "an event of a YAML parser",
    "ops/narrow_floats.py": "torch, which has `hpu` where Gaudi's software is",
    "ops/cuda/side_streams.py": "threading.local",
    "ops/unified_attention/impl/hpu/kernels.py": "operations of Gaudi's software",
}
"""File to the objects of others that it asks for attributes which they may lack. Ours have a Protocol, or a default."""


def probes(source: str) -> list[str]:
    """`hasattr(x, "name")` and `getattr(x, "name", default)`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if len(call.args) > 1 and isinstance(call.args[1], ast.Constant)]
    arguments = {"hasattr": 2, "getattr": 3}
    return [
        ast.unparse(call)
        for call in named
        if isinstance(call.func, ast.Name) and arguments.get(call.func.id) == len(call.args)
    ]


def test_what_counts_as_a_probe() -> None:
    found = probes("getattr(a, 'b', None), hasattr(a, 'b'), getattr(a, 'b'), getattr(a, name, None)")
    assert found == ["getattr(a, 'b', None)", "hasattr(a, 'b')"]


def test_our_objects_are_not_probed() -> None:
    found = {str(file.relative_to(ROOT)): probes(file.read_text(encoding="utf-8")) for file in FILES}
    assert not {name: calls for name, calls in found.items() if calls and name not in PROBES}
