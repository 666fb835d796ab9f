"""The cases that `gaudi-ucm sparse-report` compares: a method, a summary, a ratio and a configuration each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vllm_gaudi_ucm.config.ucm_config import resolve_config
from vllm_gaudi_ucm.options.files import read_config_file
from vllm_gaudi_ucm.sparse.base import UcmSparseRole
from vllm_gaudi_ucm.sparse.budget import block_budget, shortest_sparse_context
from vllm_gaudi_ucm.sparse.factory import UcmSparseFactory
from vllm_gaudi_ucm.sparse.options import BlockOptions
from vllm_gaudi_ucm.sparse.registry import method_class

if TYPE_CHECKING:
    pass

DENSE = "dense"


@dataclass(frozen=True)
class Case:
    """One row of the report. ucm: the plugin's options. options: of the choice of blocks; None: dense."""

    method: str
    options: BlockOptions | None = None
    ucm: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def summary(self) -> str:
        return "" if self.options is None else self.options.summary

    @property
    def ratio(self) -> float:
        return 1.0 if self.options is None else self.options.sparse_ratio


def make_cases(
    methods: Sequence[str],
    ratios: Sequence[float],
    summaries: Sequence[str] | None = None,
    min_tokens: int | None = None,
    config: Path | None = None,
) -> list[Case]:
    """Returns the cases: dense first, then every method with every summary at every ratio, the smallest first.

    Args:
        methods: known names; SparseMethodError names the nearest otherwise.
        ratios: parts of the context's full blocks.
        summaries: kinds; None: each method's own.
        min_tokens: shortest sparse context; None: each method's own.
        config: YAML or JSON file with the sections of `ucm_sparse_config`, whose other options apply.

    Raises:
        ValueError: an option that cannot be used; UcmConfigError if it is a method's.
    """
    for ratio in ratios:
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"--ratios: found {ratio:g}, expected shares of the context's blocks above 0 and up to 1")
    sections = {} if config is None else read_config_file(config, "ucm.ucm_sparse_config")
    resolve_config({"ucm": {"ucm_sparse_config": sections}})
    cases = [Case(DENSE)]
    kinds: Sequence[str | None] = summaries or [None]
    grid = itertools.product(dict.fromkeys(methods), dict.fromkeys(kinds), sorted(set(ratios)))
    for method, summary, ratio in grid:
        # the methods are measured even if they are no faster than dense
        always = {"sparse_steps": "always"}
        changes = {"sparse_ratio": ratio, "summary": summary, "min_tokens": min_tokens, **always}
        given = {name: value for name, value in changes.items() if value is not None}
        cases.append(_case(method, sections, given))
    return cases


def _case(method: str, sections: Mapping[str, Any], given: Mapping[str, Any]) -> Case:
    # first: its error names the nearest method; the error of an unknown section would not
    method_class(method)
    section = {**sections.get(method, {}), **given}
    ucm = {"ucm_sparse_method": method, "ucm_sparse_config": {**sections, method: section}}
    created = UcmSparseFactory.create_sparse_method(method, UcmSparseRole.SCHEDULER, resolve_config({"ucm": ucm}))
    # a method without blocks has no ratio, which is refused above
    return Case(method, cast(BlockOptions, created.selecting_method.options), ucm)


def check_length(cases: Sequence[Case], tokens: int, block_size: int, source: str) -> None:
    """Raises ValueError if a prompt of this length is dense in some case. source: its name in the message."""
    for case in cases:
        if case.options is None or block_budget(tokens, block_size, case.options) is not None:
            continue
        shortest = shortest_sparse_context(block_size, case.options)
        advice = "give a longer text" if shortest > case.options.min_tokens else "give a longer text or --min-tokens"
        raise ValueError(
            f"{source}: found {tokens:,} tokens, expected at least {shortest:,}, the shortest sparse context of "
            f"{case.method} in blocks of {block_size}; {advice}, or a smaller --block-size"
        )
