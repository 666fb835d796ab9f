"""Tables that a model looks up by the position of a token: `rotary_embedding`, and learned positions.

Internal: `iter_rope_parameters`, which names the kinds of a model's rotary angles; `cos_sin_cache`, their table, and
`long_short_cos_sin_cache` of Phi-3; `OPTLearnedPositionalEmbedding.offset`.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from vllm.transformers_utils.config import iter_rope_parameters

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# angles that are the same function of the position, however long the table is
ENDLESS = {"default", "llama3"}


def with_long_tables(vllm_config: VllmConfig) -> VllmConfig:
    """Returns a configuration for a model whose rotary tables reach `--max-model-len`.

    Reason: a table ends at `max_position_embeddings`, even if the user asks for a longer context, and a step that reads
    a row past it ends the engine. Other kinds of angles than `ENDLESS` depend on the table's length.
    Remove when: `get_rope` makes tables for `--max-model-len`.
    """
    model_config = vllm_config.model_config
    text: Any = model_config.hf_text_config
    kinds = {parameters["rope_type"] for parameters in iter_rope_parameters(text)}
    ends = getattr(text, "max_position_embeddings", None)
    if not kinds or not kinds <= ENDLESS or ends is None or ends >= model_config.max_model_len:
        return vllm_config
    longer = copy(text)
    longer.max_position_embeddings = model_config.max_model_len
    found = copy(vllm_config)
    found.model_config = copy(model_config)
    if model_config.hf_config is text:
        found.model_config.hf_config = longer
    found.model_config.hf_text_config = longer
    return found


def refuse_far_positions(model: nn.Module, model_config: ModelConfig) -> None:
    """Raises ValueError for a model with a table of positions that ends before `--max-model-len`.

    Reason: vLLM takes `--max-model-len` beyond a model's positions with `VLLM_ALLOW_LONG_MAX_MODEL_LEN=1`.
    Remove when: its models look at the length of their tables.
    """
    asked = model_config.max_model_len
    for name, ends in _tables(model, model_config):
        if ends < asked:
            raise ValueError(
                f"--max-model-len: found {asked}, expected at most {ends}: {model_config.model} has no more positions "
                f"(its layer {name} has a table of them). Set --max-model-len {ends}, or take a model with a longer "
                "context"
            )


def _tables(model: nn.Module, model_config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Names of layers that have a table, and how many positions it is for."""
    own = getattr(model_config.hf_text_config, "max_position_embeddings", None)
    for name, layer in model.named_modules():
        table = getattr(layer, "cos_sin_cache", None)
        if table is not None:
            yield name, len(table)
        elif hasattr(layer, "long_short_cos_sin_cache"):
            rotary = cast(Any, layer)
            long = rotary.use_long_rope
            yield name, rotary.max_position_embeddings if long else rotary.original_max_position_embeddings
        elif isinstance(layer, nn.Embedding):
            positions = layer.num_embeddings - getattr(layer, "offset", 0)
            # tables of other things have other lengths
            if positions == own:
                yield name, positions
