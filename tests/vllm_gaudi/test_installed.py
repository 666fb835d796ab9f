"""The replica compared with an installed vllm-gaudi; without one, nothing runs."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm_gaudi.servers import server
from vllm_gaudi_ucm_tools.vllm_gaudi.bucket_file import parse_bucket_file
from vllm_gaudi_ucm_tools.vllm_gaudi.look_up import LookUp
from vllm_gaudi_ucm_tools.vllm_gaudi.strategies import prepare, prepare_from_file

CASES = [
    (strategy, contiguous, drafts, sizes)
    for strategy in ("exp", "lin", "pad", "file")
    for contiguous in (False, True)
    for drafts in (0, 2)
    for sizes in ((2048, 32, 4096, 1000), (8192, 21, 40960, 7593))
]


class Config(SimpleNamespace):
    """The configuration of vllm-gaudi, in which everything else is unset."""

    def __getattr__(self, name: str) -> None:
        return None


@pytest.mark.parametrize(("strategy", "contiguous", "drafts", "sizes"), CASES)
def test_the_real_one_prepares_and_finds_the_same_buckets(
    strategy: str,
    contiguous: bool,
    drafts: int,
    sizes: tuple[int, int, int, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    common = pytest.importorskip("vllm_gaudi.extension.bucketing.common")
    tokens, requests, length, blocks = sizes
    environment = {"VLLM_CONTIGUOUS_PA": str(contiguous).lower()}
    config: dict[str, Any] = {"use_contiguous_pa": contiguous, "merged_prefill": False, "bucketing_strategy": strategy}
    if strategy == "file":
        path = tmp_path / "buckets.txt"
        path.write_text("(1, [256, 512, 2048], [0, 4, 30])\n([4, 21], 1, [64, 900])\n(1, 300, range(3, 9, 2))\n")
        config |= {"VLLM_BUCKETING_FROM_FILE": str(path), "bucketing_strategy": "exp"}
    else:
        environment["VLLM_BUCKETING_STRATEGY"] = strategy
    own_config = Config(**config)
    for module in ("common", "exponential", "linear", "padding_aware", "file_strategy"):
        monkeypatch.setattr(f"vllm_gaudi.extension.bucketing.{module}.get_config", lambda: own_config)
    theirs = common.HPUBucketingManager()
    theirs.initialize(requests, 1, 128, tokens, length, drafts)
    theirs.num_hpu_blocks = blocks
    theirs.generate_prompt_buckets()
    theirs.generate_decode_buckets()
    settings = server(tokens, requests, length, blocks, drafts=drafts, environment=environment)
    prepared = prepare(settings) if strategy != "file" else prepare_from_file(parse_bucket_file(path), settings)
    assert list(prepared.prompts) == theirs.prompt_buckets
    assert list(prepared.decodes) == theirs.decode_buckets
    look_up, rng = LookUp(prepared, settings), random.Random(0)
    for _ in range(300):
        query, context = rng.randint(1, tokens), rng.randint(0, length // 128)
        assert look_up.prompt(1, query, context) == tuple(theirs.find_prompt_bucket(1, query, context))
        batch, count = rng.randint(1, requests * (1 + drafts)), rng.randint(1, 2 * blocks)
        assert look_up.decode(batch, count, drafts > 0) == tuple(theirs.find_decode_bucket(batch, count, drafts > 0))
