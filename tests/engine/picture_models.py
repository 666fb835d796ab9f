"""Tiny random models that read pictures, with their processors, and what Hugging Face Transformers computes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast

from tests.engine.reference_model import ReferenceModel

VOCAB = 260
PAD, BOS, EOS, UNKNOWN, IMAGE, BREAK, END, START, VIDEO = range(9)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "[IMG_BREAK]", "[IMG_END]", "[IMG_START]", "<video>"]
SIDE = 24
"""Pixels of a picture's side, for encoders of one resolution."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 6,
}
# with Pixtral's encoder, which takes pictures of any size
_MISTRAL = {
    "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None, "architectures": ["MistralForCausalLM"]},
    "vision_config": {**_VISION, "model_type": "pixtral", "image_size": 48, "head_dim": 8},
}
_GEMMA4_TEXT: dict[str, Any] = {
    **_TEXT,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}},
    "vocab_size_per_layer_input": VOCAB,
    "tie_word_embeddings": True,
}
# a picture is scaled to 70 tokens or a few less
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4",
    "vision_config": {
        **_VISION,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 2,
        "pooling_kernel_size": 3,
        "position_embedding_size": 256,
        "default_output_length": 70,
    },
    "audio_config": None,
    "tie_word_embeddings": True,
    "image_token_id": IMAGE,
    "boi_token_id": START,
    "eoi_token_id": END,
    "video_token_id": VOCAB - 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # rows see both ways inside of a picture; one layer has a window, the other one sees whole contexts
    "gemma3": {
        "text_config": {
            **_TEXT,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "tie_word_embeddings": True,
        "mm_tokens_per_image": 16,
        "image_token_index": START,
        "boi_token_index": IMAGE,
        "eoi_token_index": END,
    },
    # layers read embeddings of tokens of their own, and the last two the keys of others
    "gemma4": {
        **_GEMMA4,
        "text_config": {**_GEMMA4_TEXT, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2},
    },
    # rows see both ways inside of a picture in layers with a window
    "gemma4_both_ways": {
        **_GEMMA4,
        "text_config": {
            **_GEMMA4_TEXT,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 80,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {**_GEMMA4["vision_config"], "standardize": True},
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_index": IMAGE,
        "image_seq_length": 16,
        "vision_feature_select_strategy": "default",
    },
    "pixtral": {
        "model_type": "llava",
        **_MISTRAL,
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
    },
    "mistral3": {
        **_MISTRAL,
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
    },
    # a picture is up to four tiles of the encoder's size, and a small copy of the whole
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {
            **_VISION,
            "image_size": [SIDE, SIDE],
            "patch_size": [6, 6],
            "attention_bias": True,
            "use_qk_norm": True,
        },
        "image_token_id": IMAGE,
        "image_seq_length": 4,
    },
}


def make_picture_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Writes a model with weights that make attention and pictures matter, and its processor."""
    torch.manual_seed(seed)
    values = {"model_type": family, "tie_word_embeddings": False, **FAMILIES[family]}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model: Any = AutoModelForImageTextToText.from_config(config)
    # Gemma multiplies them by 8, and they are also its head, which must not be certain of every token
    embedded = 0.25 if family.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
            else:
                weight.normal_(std=embedded if "embed_tokens" in name else 0.2)
        # the largest logit is above 0, so no placeholder is ever generated
        for name, buffer in model.named_buffers():
            if "std_" in name:
                buffer.normal_(std=0.1).add_("scale" in name)
        model.get_output_embeddings().weight[: len(SPECIAL)] = 0.0
        if family.startswith("gemma4"):
            model.get_output_embeddings().weight[VOCAB - 1] = 0.0
    model.to(torch.float32).save_pretrained(folder)
    _name_as_published(folder / "model.safetensors", family)
    PROCESSORS[family](folder, _tokenizer())
    return folder


def _name_as_published(file: Path, family: str) -> None:
    """Gives weights of a CLIP or SigLIP encoder the names that published checkpoints have, and that vLLM reads."""
    if family in ("llava", "gemma3"):
        weights = load_file(file)
        renamed = {
            re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): weights[name]
            for name in weights
        }
        save_file(renamed, file, {"format": "pt"})


def _tokenizer(last: Sequence[str] = (), **special: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the words `w9` to `w259`. last: words in place of the last ones. special: by role."""
    words = {name: number for number, name in enumerate(SPECIAL)}
    words |= {f"w{number}": number for number in range(len(SPECIAL), VOCAB - len(last))}
    words |= {word: VOCAB - len(last) + number for number, word in enumerate(last)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[IMAGE:],
        extra_special_tokens={
            "start_image_token": "[IMG_START]",
            "end_image_token": "[IMG_END]",
            "context_image_token": "<image>",
            "video_token": "<video>",
            **special,
        },
    )


def _llava(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"height": SIDE, "width": SIDE}
    pictures = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    LlavaProcessor(
        pictures, tokenizer, patch_size=6, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)


def _pixtral(folder: Path, tokenizer: PreTrainedTokenizerFast, merged: int = 1) -> None:
    from transformers import PixtralProcessor
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    pictures = PixtralImageProcessorPil(
        size={"longest_edge": 48}, patch_size={"height": 6 * merged, "width": 6 * merged}
    )
    PixtralProcessor(
        pictures, tokenizer, patch_size=6, spatial_merge_size=merged, image_token="<image>"
    ).save_pretrained(folder)


def _mistral3(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _pixtral(folder, tokenizer, merged=2)


def _gemma3(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    # vLLM joins ends of lines around a picture, which no prompt here has
    tokenizer = _tokenizer(
        ["\n" * count for count in (1, 2, 3, 4)],
        boi_token="<image>",
        image_token="[IMG_START]",
        eoi_token="[IMG_END]",
    )
    pictures = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Gemma3Processor(pictures, tokenizer, image_seq_length=16).save_pretrained(folder)


def _gemma4(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from transformers import Gemma4Processor, Gemma4VideoProcessor
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    tokenizer = _tokenizer(
        ["<|video|>"],
        boi_token="[IMG_START]",
        image_token="<image>",
        eoi_token="[IMG_END]",
        # the processor wants them without sound, too
        audio_token="[IMG_BREAK]",
        boa_token="[IMG_BREAK]",
        eoa_token="[IMG_BREAK]",
    )
    sizes: dict[str, Any] = {"patch_size": 2, "max_soft_tokens": 70, "pooling_kernel_size": 3}
    Gemma4Processor(
        Gemma4AudioFeatureExtractor(), Gemma4ImageProcessorPil(**sizes), tokenizer, Gemma4VideoProcessor(**sizes)
    ).save_pretrained(folder)


def _internvl(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    from transformers import InternVLProcessor, InternVLVideoProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    size = {"height": SIDE, "width": SIDE}
    pictures = GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=4)
    InternVLProcessor(pictures, tokenizer, InternVLVideoProcessor(size=size), image_seq_length=4).save_pretrained(
        folder
    )


PROCESSORS = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_both_ways": _gemma4,
    "internvl": _internvl,
    "llava": _llava,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
}


def picture(seed: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """Returns a picture of random squares, which resampling does not blur away."""
    squares = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST)


def film(seed: int, frames: int) -> NDArray[np.uint8]:
    """Returns uint8 [frames, height, width, 3], a picture each."""
    return np.stack([np.asarray(picture(100 * seed + number)) for number in range(frames)])


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def prompt(text: str, *pictures: Image.Image) -> dict[str, Any]:
    """Returns a prompt of vLLM. text: has `<image>` for each picture."""
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}} if pictures else {"prompt": text}


class PictureReference(ReferenceModel):
    """Hugging Face's model and processor of a folder."""

    def __init__(self, folder: Path, attention: str | None = None) -> None:
        super().__init__(folder, attention, AutoModelForImageTextToText)
        self.processor: Any = AutoProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def after(self, prompt: dict[str, Any], tokens: Sequence[int]) -> torch.Tensor:
        media = prompt.get("multi_modal_data", {})
        inputs = self.processor(
            images=media.get("image"),
            text=prompt["prompt"],
            return_tensors="pt",
            **({"videos": media["video"]} if "video" in media else {}),
        )
        more = torch.tensor([list(tokens[:-1])], dtype=torch.int64)
        inputs["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        for kinds in {"token_type_ids", "mm_token_type_ids"}.intersection(inputs):
            inputs[kinds] = torch.cat([inputs[kinds], torch.zeros_like(more)], 1)
        logits = self.model(**inputs).logits[0, -len(tokens) :]
        return torch.log_softmax(logits.float(), dim=-1)
