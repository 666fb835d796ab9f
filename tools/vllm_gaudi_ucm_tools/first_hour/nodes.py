"""Counts a region's operators after AOT, while it is compiled: the input of the device's compiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from vllm_gaudi_ucm_tools.first_hour.bench import BACKENDS, HPU_OPTIONS, Bench, attempt
from vllm_gaudi_ucm_tools.op_cost.node_count import count_graph


class CountedRegion:
    """A function that is compiled when it is called, once: a second compilation would find the recipes of the first.

    operators: in all of its graphs, views not counted. error: why they could not be counted, "" if they were. seconds:
        time of counting, not included in the compilation's.
    """

    def __init__(self, bench: Bench, function: Callable[..., Any]) -> None:
        self.operators = 0
        self.error = ""
        self.seconds = 0.0
        options = {"options": HPU_OPTIONS} if bench.kind == "hpu" else {}
        compiler: Any = torch._dynamo.lookup_backend(BACKENDS[bench.kind])

        def backend(graph: GraphModule, examples: Any) -> Any:
            begin = time.perf_counter()
            self.error = self.error or attempt(lambda: self._count(graph, examples)).error
            self.seconds += time.perf_counter() - begin
            return compiler(graph, examples, **options)

        self._run = torch.compile(function, backend=backend, dynamic=False)

    def __call__(self, *inputs: Any) -> Any:
        """Calls the function without gradients."""
        with torch.no_grad():
            return self._run(*inputs)

    def _count(self, graph: GraphModule, examples: Any) -> None:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def count(functional: GraphModule, examples: Any) -> Any:
            self.operators += count_graph(functional.graph).num_operators
            return make_boxed_func(functional.forward)

        # shapes alone are traced: whatever watches the device's own operators is not asked
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            aot_autograd(fw_compiler=count, inference_compiler=count)(graph, examples)
