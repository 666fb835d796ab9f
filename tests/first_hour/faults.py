"""Faults of a card, planted in the process of a probe. Each changes torch, the simulator or the plugin.

A fault gets `patch`, which is called as `setattr` is, and which may undo it later.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Patch = Callable[[Any, str, Any], None]


def unknown_generation(patch: Patch) -> None:
    """The card is of a generation that no text speaks of."""
    from vllm_gaudi_ucm.device.hpu import HpuDevice

    patch(HpuDevice, "name", lambda self: "GAUDI9")


def compiles_each_call(patch: Patch) -> None:
    """Every call is a compilation."""
    from vllm_gaudi_ucm.device.hpu import HpuDevice

    calls = iter(range(1_000_000))
    patch(HpuDevice, "compilations", lambda self: next(calls))


def drops_writes(patch: Patch) -> None:
    """index_copy_ returns the right result, and writes nothing."""
    import torch

    kept = torch.Tensor.index_copy
    patch(torch.Tensor, "index_copy_", lambda self, *rest: kept(self, *rest))


def wrong_where(patch: Patch) -> None:
    """The branches of an integer torch.where are exchanged."""
    import torch

    right = torch.where
    from vllm_gaudi_ucm_tools.first_hour.probes import integers

    def where(mask: Any, a: Any, b: Any) -> Any:
        return right(mask, b, a) if mask.device.type == "hpu" else right(mask, a, b)

    patch(integers, "_PATTERNS", {**integers._PATTERNS, "where(mask, a, b)": where})


def repeats_random_numbers(patch: Patch) -> None:
    """Every region draws the same."""
    import torch

    patch(torch, "rand_like", lambda x: torch.full_like(x, 0.5))


def corrupts_copies(patch: Patch) -> None:
    """A copy to the card loses its last byte."""
    import torch
    from habana_frameworks.torch.simulator import device_mode

    right = device_mode._HANDLERS[torch.Tensor.to]

    def to(func: Any, args: Any, named: dict[str, Any]) -> Any:
        is_hit = args[0].dtype == torch.uint8 and named.get("copy")
        result = right(func, args, named)
        if is_hit:
            result = result.clone()
            result[-1:] = 7
        return result

    patch(device_mode, "_HANDLERS", {**device_mode._HANDLERS, torch.Tensor.to: to})


def unordered_topk(patch: Patch) -> None:
    """topk gives the smallest first."""
    import torch

    right = torch.topk

    def topk(x: Any, k: int) -> Any:
        return right(x, k) if x.device.type == "cpu" else right(-x, k)

    patch(torch, "topk", topk)


def refuses_wide_products(patch: Patch) -> None:
    """No matrix product into float32, as on other devices."""
    import torch

    right = torch.matmul

    def matmul(a: Any, b: Any, out: Any = None) -> Any:
        if out is not None and out.dtype != a.dtype:
            raise RuntimeError("out has another dtype")
        return right(a, b)

    patch(torch, "matmul", matmul)


def loses_recipes(patch: Patch) -> None:
    """The recipe cache on disk keeps nothing."""
    from habana_frameworks.torch.simulator.recipes import RecipeFolder

    patch(RecipeFolder, "holds", lambda self, key: False)


def wrong_attention(patch: Patch) -> None:
    """Attention is half as large again."""
    from vllm_gaudi_ucm.ops.unified_attention.impl.hpu.attention import HpuAttention

    right = HpuAttention.attend

    def attend(self: Any, *args: Any) -> Any:
        done = right(self, *args)
        args[7].mul_(1.5)
        return done

    patch(HpuAttention, "attend", attend)


def wrong_merge(patch: Patch) -> None:
    """The second of two partial results is forgotten."""
    from vllm_gaudi_ucm_tools.first_hour.probes import softmax

    patch(softmax, "_merge", lambda a, b: a[0] / a[2])


def two_cards(patch: Patch) -> None:
    """No fault: two cards are visible, which gloo connects."""
    from habana_frameworks.torch.simulator import card

    patch(card, "device_count", 2)


def wrong_sums(patch: Patch) -> None:
    """Two cards, and an all_reduce that forgets the other one."""
    two_cards(patch)
    import torch.distributed as dist

    patch(dist, "all_reduce", lambda x: None)


def few_graphs(patch: Patch) -> None:
    """No fault: what serves has as few graphs as there can be."""
    if "serving:" in " ".join(sys.orig_argv):
        from vllm_gaudi_ucm_tools.first_hour.probes import serving

        patch(serving, "FEW_GRAPHS", 2)


def segfault(patch: Patch) -> None:
    """The bridge crashes when it is asked for a stream, an event or memory."""
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(patch: Patch) -> None:
    """The bridge never comes back."""
    time.sleep(3600)


def hang_in_probes(patch: Patch) -> None:
    """As `hang`, but not while the machine is recorded."""
    if "card:machine" not in " ".join(sys.orig_argv):
        hang(patch)


FAULTS: dict[str, Callable[[Patch], None]] = {
    fault.__name__: fault
    for fault in (
        unknown_generation,
        compiles_each_call,
        drops_writes,
        wrong_where,
        repeats_random_numbers,
        corrupts_copies,
        unordered_topk,
        refuses_wide_products,
        loses_recipes,
        wrong_attention,
        wrong_merge,
        two_cards,
        wrong_sums,
        few_graphs,
        segfault,
        hang,
        hang_in_probes,
    )
}
