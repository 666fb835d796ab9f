"""Checks at start and of each request: a refusal names the option or request, and the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from vllm_gaudi_ucm.config.ucm_config import UcmConfig
from vllm_gaudi_ucm.connector.transfer_config import OURS, ConnectorOptions, configured_connectors
from vllm_gaudi_ucm.connector.transfer_params import check_transfer_params
from vllm_gaudi_ucm.logger import plugin_logger
from vllm_gaudi_ucm.observability.phase_log import PhaseLogError
from vllm_gaudi_ucm.options.errors import UnsupportedRequestError
from vllm_gaudi_ucm.sparse.options import read_extra_args
from vllm_gaudi_ucm.store.factory import open_medium
from vllm_gaudi_ucm.store.file import FileStoreOptions

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig

    from vllm_gaudi_ucm.store.base import StoreOptions

logger = plugin_logger(__name__)

_OF_LABELS = {"Qwen2ForProcessRewardModel": 2}
"""Models whose forward returns a column for each label in place of hidden states."""


class RequestLimits(NamedTuple):
    """Sizes that requests are checked against; 0 if a size is unknown.

    vocab_size: of the largest vocabulary. embedding_width: of a prompt's embeddings. columns: that a pooler can return
    of each token; -1 if its classifier needs all of them.
    """

    vocab_size: int = 0
    embedding_width: int = 0
    columns: int = 0

    @classmethod
    def of(cls, model: ModelConfig, before: RequestLimits) -> RequestLimits:
        """Returns the limits of a model. before: limits of models that the process has configured already.

        Raises ValueError if the configuration of the pooler asks for columns that there are not.
        """
        columns = _OF_LABELS.get(model.architecture, model.get_hidden_size())
        found = cls(
            max(before.vocab_size, model.get_vocab_size()),
            model.get_inputs_embeds_size(),
            -1 if model.convert_type == "classify" else columns,
        )
        if model.pooler_config is not None:
            _check_columns("--pooler-config: returned_token_ids", model.pooler_config.returned_token_ids, found.columns)
        return found


def warn_of_slow_dtype(vllm_config: VllmConfig, device_type: str) -> None:
    """Warns if the CPU lacks arithmetic in the model's dtype."""
    model = vllm_config.model_config
    if device_type != "cpu" or model is None or model.dtype == torch.float32:
        return
    if not torch.cpu._is_avx512_bf16_supported():
        logger.warning(
            "This CPU has no fast %s arithmetic; --dtype float32 is many times faster here.",
            str(model.dtype).removeprefix("torch."),
        )


def check_places(config: UcmConfig, transfer: KVTransferConfig | None) -> None:
    """Opens file stores, which makes their folders, and checks that the phase log can be written.

    transfer: with valid options. Raises UcmConfigError, PhaseLogError.
    """
    if config.phase_log is not None:
        _check_phase_log(config.phase_log)
    for store in _stores(config, transfer):
        # a server that does not answer is no error: the store misses until it does
        if isinstance(store, FileStoreOptions):
            open_medium(store).close()


def _stores(config: UcmConfig, transfer: KVTransferConfig | None) -> Iterator[StoreOptions]:
    for connector in configured_connectors(transfer):
        if connector.name == OURS:
            yield ConnectorOptions.resolve(connector.extra, connector.key).store
    if config.memory_mode.enabled and config.memory_mode.store is not None:
        yield config.memory_mode.store


def _check_phase_log(path: Path) -> None:
    wrong = None
    if path.is_dir():
        wrong = errno.EISDIR
    elif not path.parent.is_dir():
        wrong = errno.ENOTDIR if path.parent.exists() else errno.ENOENT
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        wrong = errno.EACCES
    if wrong is not None:
        raise PhaseLogError(
            f"ucm.phase_log: cannot write {path}: {os.strerror(wrong)}; "
            "expected a file name in a folder that exists and is writable"
        )


def _check_columns(name: str, ids: list[int] | None, columns: int) -> None:
    """Raises ValueError for ids of columns that no pooler has: vLLM would fail, or stop the device, in a step."""
    wrong = [number for number in ids or () if not 0 <= number < max(columns, 0)]
    if columns and wrong:
        expected = f"0 to {columns - 1}" if columns > 0 else "none, because a classifier reads all columns of a token"
        raise ValueError(f"{name}: found {wrong[0]}, expected {expected}; correct the ids or leave them out")


def check_request(given: SamplingParams | PoolingParams, columns: int) -> None:
    """Raises ValueError with the parameter, what was found and what to do.

    columns: that a pooler can return of each token; vLLM checks its other parameters.
    """
    if not hasattr(given, "temperature"):
        _check_columns("returned_token_ids", given.returned_token_ids, columns)
        return
    params = cast("SamplingParams", given)
    read_extra_args(params.extra_args)
    for name in ("kv_transfer_params", "ec_transfer_params"):
        found = (params.extra_args or {}).get(name)
        if found is not None and not isinstance(found, dict):
            # vLLM reads it as a mapping, in the server and in the engine
            raise ValueError(f"extra_args[{name!r}]: found {found!r}, expected a mapping; correct or remove it")
    check_transfer_params((params.extra_args or {}).get("kv_transfer_params") or {})
    asked = {
        "prompt_logprob_token_ids": params.prompt_logprob_token_ids is not None,
        "watermarking": bool(params.watermarking),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise UnsupportedRequestError(name)


def check_prompt(prompt: Any, vocab_size: int) -> None:
    """Raises ValueError for token ids outside the vocabulary: a step would read beyond the model's embeddings.

    vLLM compares ids with the larger of the tokenizer's and the model's vocabulary, and with neither under
    `--skip-tokenizer-init`.

    Args:
        prompt: vLLM's processed inputs; anything without `prompt_token_ids` passes.
        vocab_size: the model's; 0 if it is unknown.
    """
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if tokens and prompt.get("is_token_ids") is not None:
        # the others stand for embeddings
        tokens = [token for token, is_token in zip(tokens, prompt["is_token_ids"], strict=False) if is_token]
    if not tokens or not vocab_size:
        return
    least, most = min(tokens), max(tokens)
    if least < 0 or most >= vocab_size:
        raise ValueError(
            f"Token id {least if least < 0 else most} is out of vocabulary: found in the prompt, expected 0 to "
            f"{vocab_size - 1}; correct the ids, or use the tokenizer of this model"
        )


def check_prompt_embeddings(prompt: Any, params: Any, width: int) -> None:
    """Raises ValueError for embeddings that do not fit the model, or that ask for logprobs of tokens that they hide.

    Args:
        prompt: vLLM's processed inputs; anything without `prompt_embeds` passes.
        params: `SamplingParams` or `PoolingParams`.
        width: size of an embedding.
    """
    embeddings = prompt.get("prompt_embeds") if isinstance(prompt, dict) else None
    if embeddings is None:
        return
    if embeddings.shape[1] != width or not embeddings.is_floating_point():
        raise ValueError(
            f"prompt_embeds: found {list(embeddings.shape)} of {embeddings.dtype}, expected floating-point numbers of "
            f"[tokens, {width}]; use the model's own embeddings"
        )
    tokens = prompt.get("prompt_token_ids")
    if tokens is not None and len(tokens) != len(embeddings):
        raise ValueError(f"prompt_embeds: found {len(embeddings)} rows and {len(tokens)} token ids, expected as many")
    if getattr(params, "prompt_logprobs", None) is not None:
        raise ValueError("prompt_logprobs: found a prompt of embeddings, which has no tokens to score; leave it out")
