"""The converted demo model loads without a network, with its special tokens and chat template, and answers sensibly."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.packaging.source_tree import ROOT
from vllm_gaudi_ucm_tools.demo.model import DEFAULT_OUTPUT, MARKER

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    path = ROOT / DEFAULT_OUTPUT
    assert (path / MARKER).is_file(), f"{path} is missing: run `make model`"
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_special_tokens(tokenizer: AutoTokenizer) -> None:
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    assert tokenizer("a<|im_end|>b").input_ids == [81, 2, 82]
    assert tokenizer.decode([1, 81, 2], skip_special_tokens=True) == "a"
    assert tokenizer.model_max_length == 8192


def test_numbers_are_split_into_digits(tokenizer: AutoTokenizer) -> None:
    """SmolLM2 was trained on single digits; the conversion has no rule for it, the vocabulary alone must do it."""
    assert tokenizer.tokenize("In 2024: $3.50") == ["In", "Ġ", "2", "0", "2", "4", ":", "Ġ$", "3", ".", "5", "0"]


def test_chat_template(tokenizer: AutoTokenizer) -> None:
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False) == PROMPT


def test_answer(folder: Path, tokenizer: AutoTokenizer) -> None:
    network = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert network.dtype == torch.float32
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = network.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(tokens) == "The capital of France is Paris.<|im_end|>"
