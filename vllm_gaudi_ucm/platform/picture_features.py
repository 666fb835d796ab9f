"""Features that models with pictures refuse: families, other media, and what does not go with pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_gaudi_ucm.platform.feature import Feature, unless, where
from vllm_gaudi_ucm.vllm_api.blocks import tells_clients_of_errors
from vllm_gaudi_ucm.vllm_api.platforms import computes_drafts, is_pooling, reads_pictures, takes_media

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FAMILIES = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Classes of models whose pictures are read."""

WITH_VIDEOS = (
    "InternVLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Classes of models whose videos are read, too."""


def _shared_out(config: VllmConfig) -> str | None:
    options = config.model_config.multimodal_config
    return None if options is None else unless(options.mm_encoder_tp_mode, ("weights",))


def _takes_embeddings(config: VllmConfig) -> bool:
    options = config.model_config.multimodal_config
    return options is not None and options.enable_mm_embeds


def _other_family(config: VllmConfig) -> str | None:
    return unless(config.model_config.architecture, FAMILIES)


def _no_videos(config: VllmConfig) -> bool:
    return config.model_config.architecture not in WITH_VIDEOS and takes_media(config, "video")


def _has_sound(config: VllmConfig) -> bool:
    return config.model_config.architecture in FAMILIES and takes_media(config, "audio")


def _pruned(config: VllmConfig) -> bool:
    options = config.model_config.multimodal_config
    return options is not None and bool(options.video_pruning_rate)


def _tokens_of_picture(config: VllmConfig) -> int:
    """Returns the most tokens of a picture if the configuration says so, as Gemma's does; otherwise 0."""
    model = config.model_config
    options = model.multimodal_config
    values: dict[str, Any] = model.hf_config.to_dict()
    asked: Any = (options.mm_processor_kwargs or {}).get("max_soft_tokens") if options is not None else None
    vision = values.get("vision_config") or {}
    return int(asked or values.get("mm_tokens_per_image") or vision.get("default_output_length") or 0)


def _beyond_window(config: VllmConfig) -> str | None:
    model = config.model_config
    window, tokens = model.get_sliding_window(), _tokens_of_picture(config)
    return f"{tokens} tokens" if model.is_mm_prefix_lm and window is not None and tokens > window else None


OF_PICTURES: tuple[Feature[VllmConfig], ...] = (
    Feature(
        """videos in prompts (set --limit-mm-per-prompt '{{"video": 0}}')""",
        "the model",
        f"only videos of {', '.join(WITH_VIDEOS)} have been tried",
        where(reads_pictures, _no_videos),
    ),
    Feature(
        """sound in prompts (set --limit-mm-per-prompt '{{"audio": 0}}')""",
        "the model",
        "the layers of its encoder have not been tried",
        where(reads_pictures, _has_sound),
    ),
    Feature(
        "videos of which only a part is kept",
        "--video-pruning-rate",
        "positions of tokens are known before a video is encoded; leave the flag out",
        where(reads_pictures, _pruned),
    ),
    Feature(
        "pictures and other media of {found}",
        "the model",
        f"only {', '.join(FAMILIES)} have been tried; --language-model-only serves the text model alone",
        where(reads_pictures, _other_family),
    ),
    Feature(
        "pictures of {found} each that are longer than the model's window",
        "the model",
        "a row would see the whole picture, and only a part of the window; take a model with a wider window",
        where(reads_pictures, _beyond_window),
    ),
    Feature(
        "pictures with pipeline stages",
        "--pipeline-parallel-size",
        "only the last stage can report a picture that the first one cannot encode; take --tensor-parallel-size",
        where(reads_pictures, lambda c: c.parallel_config.pipeline_parallel_size > 1),
    ),
    Feature(
        "pictures with a draft model",
        "--speculative-config",
        "it would read the placeholders of pictures as tokens; take the method `ngram`",
        where(reads_pictures, lambda c: computes_drafts(c.speculative_config)),
    ),
    Feature(
        "pictures with a model that pools",
        "--runner pooling",
        "vLLM 0.32 would answer a request whose picture cannot be encoded with an empty vector; take a newer vLLM, or "
        "a model of text",
        where(reads_pictures, lambda c: is_pooling(c) and not tells_clients_of_errors()),
    ),
    Feature(
        "pictures with several engines that share out experts",
        "--data-parallel-size",
        "it has not been tried; take --tensor-parallel-size",
        where(reads_pictures, lambda c: c.parallel_config.data_parallel_size > 1),
    ),
    Feature(
        "pictures that ranks share out",
        "--mm-encoder-tp-mode {found}",
        "each rank encodes every picture with its part of the weights; leave the flag out",
        where(reads_pictures, _shared_out),
    ),
    Feature(
        "times of pictures' processors",
        "--enable-mm-processor-stats",
        "a worker does not measure its encoder; leave the flag out",
        where(reads_pictures, lambda c: c.observability_config.enable_mm_processor_stats),
    ),
    Feature(
        "embeddings of pictures in requests",
        "--enable-mm-embeds",
        "a request has the pictures themselves; leave the flag out",
        where(reads_pictures, _takes_embeddings),
    ),
)
