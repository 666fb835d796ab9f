"""The settings of a vllm-gaudi server that decide about its buckets: limits, and environment variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

STRATEGIES = ("exp", "lin", "pad")
DIMENSIONS = ("PROMPT_BS", "PROMPT_QUERY", "PROMPT_SEQ", "PROMPT_CTX", "DECODE_BS", "DECODE_BLOCK")
SUFFIXES = ("MIN", "STEP", "MAX", "PAD_MAX", "PAD_PERCENT")
SIZES = tuple(f"VLLM_{dimension}_BUCKET_{suffix}" for dimension, suffix in product(DIMENSIONS, SUFFIXES))
PREFILL_BATCH = "VLLM_PROMPT_BS_BUCKET_MAX"
SLICED, SLICE, SLICED_FROM = "PT_HPU_SDPA_QKV_SLICE_MODE_FWD", "PT_HPU_SDPA_BC_FACTOR", "VLLM_FUSEDSDPA_SLIDE_THLD"
SWITCHES = ("VLLM_EXPONENTIAL_BUCKETING", "VLLM_CONTIGUOUS_PA", SLICED)
NUMBERS = (*SIZES, SLICE, SLICED_FROM)
VARIABLES = ("VLLM_BUCKETING_STRATEGY", *SWITCHES, *NUMBERS)
TRUE, FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")
MOST = 2**31 - 1

# From this length on, contexts get an entry of their own for each query.
LONG_CONTEXT = 8192
DEFAULT_SLICE = 1024
DEFAULT_SLICED_FROM = 8192


class SettingsError(ValueError):
    """A setting that such a server does not know, or cannot use."""


@dataclass(frozen=True)
class Settings:
    """A server of vllm-gaudi, as far as its buckets depend on it.

    max_num_batched_tokens, max_num_seqs, max_model_len, block_size, num_blocks: its limits; tokens, requests, tokens,
        tokens of a block, blocks of the KV cache.
    drafts: speculative tokens of a request and step. ranks: data-parallel engines that step together.
    hybrid_chunk: chunk of a hybrid model's state layers, if it is set explicitly; 0 for other models.
    prefix_caching: whether requests share blocks. With it contiguous reading is off, unless a variable switches it on.
    environment: variables of `VARIABLES`.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    drafts: int = 0
    ranks: int = 1
    hybrid_chunk: int = 0
    prefix_caching: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"max_num_batched_tokens": 2, "max_num_seqs": 1, "max_model_len": 2, "block_size": 1, "num_blocks": 2}
        least |= {"ranks": 1, "drafts": 0, "hybrid_chunk": 0}
        for name, lowest in least.items():
            if not lowest <= getattr(self, name) <= MOST:
                raise SettingsError(f"{name} is {getattr(self, name)}, expected {lowest} to {MOST}")
        if self.hybrid_chunk and self.max_num_batched_tokens % self.hybrid_chunk:
            raise SettingsError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, which vllm-gaudi refuses for a hybrid model "
                f"with chunks of {self.hybrid_chunk}; expected a multiple of them"
            )
        for name in self.environment:
            self._check(name)
        if not 1 <= self.prefill_batch <= self.max_num_seqs:
            raise SettingsError(
                f"{PREFILL_BATCH} is {self.prefill_batch}, expected 1 to max_num_seqs ({self.max_num_seqs})"
            )

    def _check(self, name: str) -> None:
        """Raises SettingsError if a variable is unknown or its value malformed."""
        value = self.environment[name]
        if name not in VARIABLES:
            raise SettingsError(
                f"{name} is not a variable that decides about vllm-gaudi's buckets; expected VLLM_BUCKETING_STRATEGY, "
                f"{', '.join(SWITCHES)}, {SLICE}, {SLICED_FROM}, or "
                f"VLLM_{{{','.join(DIMENSIONS)}}}_BUCKET_{{{','.join(SUFFIXES)}}}"
            )
        if name == "VLLM_BUCKETING_STRATEGY" and value not in STRATEGIES:
            raise SettingsError(f"{name} is {value!r}, expected one of {', '.join(STRATEGIES)}")
        if name in SWITCHES and value.lower() not in TRUE + FALSE:
            raise SettingsError(f"{name} is {value!r}, expected true or false")
        if name in NUMBERS and not (value.isdecimal() and value.isascii() and int(value) <= MOST):
            raise SettingsError(f"{name} is {value!r}, expected a whole number from 0 to {MOST}")

    def number(self, name: str, default: int) -> int:
        """Returns the value of a variable; a deprecated name counts if the new one is not set."""
        value = self.environment.get(name, self.environment.get(name.replace("_QUERY_", "_SEQ_")))
        return default if value is None else int(value)

    def switch(self, name: str, default: bool) -> bool:
        value = self.environment.get(name)
        return default if value is None else value.lower() in TRUE

    @property
    def strategy(self) -> str:
        """Returns the strategy that the variables choose; the deprecated switch overrides the newer variable."""
        chosen = self.environment.get("VLLM_BUCKETING_STRATEGY", "exp")
        if "VLLM_EXPONENTIAL_BUCKETING" in self.environment:
            return "exp" if self.switch("VLLM_EXPONENTIAL_BUCKETING", True) else "lin"
        return chosen

    @property
    def contiguous(self) -> bool:
        return self.switch("VLLM_CONTIGUOUS_PA", not self.prefix_caching)

    @property
    def prefill_batch(self) -> int:
        """Returns how many prompts a prefill may hold."""
        return self.number(PREFILL_BATCH, 1)

    @property
    def slices(self) -> tuple[int, int] | None:
        """Returns (tokens from which queries are sliced, tokens of a slice); None if they are not."""
        if not self.switch(SLICED, False):
            return None
        return self.number(SLICED_FROM, DEFAULT_SLICED_FROM), max(1, self.number(SLICE, DEFAULT_SLICE))

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def most_context(self) -> int:
        """Returns the blocks of the longest context that leaves room for a token."""
        return -(-(self.max_model_len - 1) // self.block_size)

    @property
    def decode_tokens(self) -> int:
        """Returns the tokens of a decode: one, and its drafts."""
        return 1 + self.drafts


def read_assignments(texts: Iterable[str], option: str) -> dict[str, str]:
    """Returns the variables of texts like NAME=VALUE. Raises SettingsError that names the option."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise SettingsError(f"{option} is {text!r}, expected NAME=VALUE, such as VLLM_BUCKETING_STRATEGY=pad")
        if name in found:
            raise SettingsError(f"{option} sets {name} twice, expected it once")
        found[name] = value
    return found
