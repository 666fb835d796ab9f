"""Models in which later layers read the keys and values of earlier ones: Gemma 3n, and Gemma 4, whose layers with full
attention have larger heads. Their tokens are those of Transformers.

Every block holds NaN until a request writes it, the null block included, which stands for blocks before a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.engine.kv_groups import prompts
from tests.engine.reference_model import ReferenceModel
from tests.engine.serving import Engine
from tests.engine.shared_keys import MODELS, write_model
from tests.engine.tiny_models import COMMON
from vllm_gaudi_ucm.options.errors import UnsupportedFeatureError

pytestmark = pytest.mark.slow  # starts engines

TOKENS = 48
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 256}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    return write_model(folder, AutoConfig.for_model(request.param, **{**COMMON, **MODELS[request.param]}))


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceModel:
    return ReferenceModel(model, "eager")


def engine(model: Path, mode: str, **options: Any) -> Engine:
    found = Engine(model, {"graphs": {"mode": mode, "max_graphs": 8}}, **{**OPTIONS, **options})
    found.poison()
    return found


@pytest.fixture(scope="module", params=["off", "eager"])
def serving(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    with engine(model, request.param) as found:
        yield found


def test_chunks_and_prefix_hits(serving: Engine, reference: ReferenceModel) -> None:
    for cached in ([0, 0, 0, 0, 0], [0, 144, 16, 128, 0]):
        answers = serving.greedy(prompts(), TOKENS if not any(cached) else 8)
        reference.assert_greedy(prompts(), answers)
        assert [answer.cached_tokens for answer in answers] == cached
        serving.check_idle()


def test_layers_that_share_have_no_cache(serving: Engine, model: Path) -> None:
    """Gemma 3n keeps a table for windows and one for whole contexts; Gemma 4 one table, as heads differ in size."""
    groups = serving.core.scheduler.kv_cache_config.kv_cache_groups
    cached = [name for group in groups for name in group.layer_names if name in serving.runner.parts.kv_caches]
    own = {str(number) for number in range(5)}
    assert own <= {name.split(".")[2] for name in cached}
    tables = {"gemma3n_text": 5, "gemma4_text": 1}[model.name]
    assert len(groups) == tables, [len(group.layer_names) for group in groups]
    buffers = {tensor.data_ptr() for pair in serving.runner.parts.kv_caches.values() for tensor in pair}
    assert len(buffers) <= 2 * 5


def test_preempted_requests(model: Path, reference: ReferenceModel) -> None:
    tight = {"gemma3n_text": 45, "gemma4_text": 17}[model.name]
    with engine(model, "off", num_gpu_blocks_override=tight) as serving:
        answers = serving.greedy(prompts(), TOKENS)
        assert serving.preemptions
        serving.check_idle()
    reference.assert_greedy(prompts(), answers)


def test_several_tables_are_refused_where_heads_differ(model: Path) -> None:
    if model.name != "gemma4_text":
        pytest.skip("heads are of one size")
    with pytest.raises(UnsupportedFeatureError, match="heads of several sizes"):
        engine(model, "off", disable_hybrid_kv_cache_manager=False)


def test_text_of_a_model_with_pictures(tmp_path: Path) -> None:
    """Gemma 4 with an encoder, which is left out."""
    pytest.importorskip("torchvision")  # vLLM's class imports it
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text, placeholders = {**COMMON, **MODELS["gemma4_text"]}, {"image_token_id": 250, "video_token_id": 251}
    config = AutoConfig.for_model(
        "gemma4", text_config=text, vision_config={**vision, "head_dim": 8}, audio_config=None, **placeholders
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    asked = [[min(token, 249) for token in prompt] for prompt in prompts()]
    with engine(tmp_path, "eager", language_model_only=True) as serving:
        answers = serving.greedy(asked, 16)
    ReferenceModel(tmp_path, "eager", kind=AutoModelForImageTextToText).assert_greedy(asked, answers)
