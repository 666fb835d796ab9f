"""The buckets that vllm-gaudi prepares before it serves: by strategy or from a file, filtered and corrected."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from vllm_gaudi_ucm_tools.vllm_gaudi.settings import LONG_CONTEXT, Settings, SettingsError
from vllm_gaudi_ucm_tools.vllm_gaudi.value_ranges import exponential, linear, padding_aware

Shape = tuple[int, int, int]
"""(requests, tokens of each, blocks): the context of the longest prompt, or the blocks of all decodes."""


# Shapes beyond which a strategy's grid is not looked at; none of them would end its warm-up in a day.
MOST_SHAPES = 400_000


class Ranges(NamedTuple):
    """The values of each dimension of a phase; decodes have one token."""

    batches: list[int]
    queries: list[int]
    contexts: list[int]


@dataclass(frozen=True)
class Prepared:
    """The buckets of a server at its start, sorted.

    seeds: decodes before those for drafts were added. omitted: entries of a file that the server leaves out.
    """

    prompts: tuple[Shape, ...]
    decodes: tuple[Shape, ...]
    seeds: tuple[Shape, ...]
    omitted: tuple[Shape, ...] = ()

    @property
    def num_graphs(self) -> int:
        return len(self.prompts) + len(self.decodes)


def prepare(settings: Settings) -> Prepared:
    """Returns the buckets of the strategy. Raises SettingsError if the server would end with an error."""
    prompt_ranges, decode_ranges = RANGES[settings.strategy](settings)
    if settings.contiguous and decode_ranges.contexts[-1] < settings.num_blocks:
        decode_ranges.contexts.append(settings.num_blocks)
    for ranges in (prompt_ranges, decode_ranges):
        if (size := math.prod(map(len, ranges))) > MOST_SHAPES:
            raise SettingsError(f"it makes {size:,} shapes before its filters, too many to compile or to list here")
    prompts = {shape for shape in _prompt_grid(prompt_ranges, settings) if keeps_prompt(shape, settings)}
    grid = ((batch, 1, context) for batch in decode_ranges.batches for context in decode_ranges.contexts)
    decodes = {corrected(shape, settings) for shape in grid if keeps_decode(shape, settings)}
    return _prepared(prompts, decodes, settings)


def prepare_from_file(entries: Iterable[Shape], settings: Settings) -> Prepared:
    """Returns the buckets of a file's entries, of which those with one token are decodes."""
    entries = set(entries)
    prompts = {shape for shape in entries if shape[1] != 1}
    decodes = entries - prompts
    for phase, shapes in (("prompt", prompts), ("decode", decodes)):
        if not shapes:
            raise SettingsError(f"the file has no {phase} entries; vllm-gaudi ends at start with such a file")
    omitted = {shape for shape in prompts if not keeps_prompt(shape, settings)}
    omitted |= {shape for shape in decodes if not keeps_decode(shape, settings)}
    return _prepared(prompts - omitted, {corrected(shape, settings) for shape in decodes - omitted}, settings, omitted)


def _prepared(prompts: set[Shape], decodes: set[Shape], settings: Settings, omitted: Iterable[Shape] = ()) -> Prepared:
    for phase, shapes in (("prompt", prompts), ("decode", decodes)):
        if not shapes:
            raise SettingsError(
                f"0 {phase} buckets are left after vllm-gaudi's filters, which ends its start; check the limits of the "
                "server and the variables of its buckets"
            )
    kept = {shape for shape in prompts if _fits_slices(shape, settings)}
    seeds = tuple(sorted(decodes))
    drafted = tuple(sorted({*seeds, *_for_drafts(seeds, settings)})) if settings.drafts else seeds
    return Prepared(tuple(sorted(kept)), drafted, seeds, tuple(sorted(omitted)))


def keeps_prompt(shape: Shape, settings: Settings) -> bool:
    batch, query, context = shape
    within = context <= settings.most_context and query <= settings.max_model_len
    return within and batch * query <= settings.max_num_batched_tokens


def keeps_decode(shape: Shape, settings: Settings) -> bool:
    """Returns whether a decode bucket is prepared: each request has a block, unless blocks are read contiguously."""
    return settings.contiguous or shape[0] <= shape[2]


def corrected(shape: Shape, settings: Settings) -> Shape:
    """Returns a decode bucket with no more blocks than its requests can have."""
    batch, query, context = shape
    return shape if settings.contiguous else (batch, query, min(context, batch * settings.blocks_per_request))


def _fits_slices(shape: Shape, settings: Settings) -> bool:
    slices = settings.slices
    return slices is None or shape[2] != 0 or shape[1] < slices[0] or shape[1] % slices[1] == 0


def _for_drafts(seeds: Iterable[Shape], settings: Settings) -> Iterable[Shape]:
    tokens = settings.decode_tokens
    for batch, query, context in seeds:
        if batch * tokens <= context:
            yield corrected((batch * tokens, query, context), settings)
        yield corrected((batch * tokens, query, context * tokens), settings)


def _prompt_grid(ranges: Ranges, settings: Settings) -> Iterable[Shape]:
    """Yields the grid of a phase. With long contexts each query has a largest context of its own instead of the last
    value of the range.
    """
    chunk = settings.hybrid_chunk or 1
    queries = [-(-query // chunk) * chunk for query in ranges.queries]
    largest = max(ranges.contexts)
    # 0 is a bound, too: then no context of a query's own is taken
    bound = settings.number("VLLM_PROMPT_CTX_BUCKET_MAX", -1)
    for batch in ranges.batches:
        for value in ranges.contexts:
            context = value
            for query in queries:
                if value == largest and settings.max_model_len >= LONG_CONTEXT:
                    own = (settings.max_model_len - query) // settings.block_size
                    # a context that is not allowed leaves the one of the query before it
                    context = own if own >= 0 and (bound < 0 or own < bound) else context
                yield batch, query, context


def _exp(settings: Settings) -> tuple[Ranges, Ranges]:
    length, block, tokens = settings.max_model_len, settings.block_size, settings.max_num_batched_tokens
    prefills, requests, blocks = settings.prefill_batch, settings.max_num_seqs, settings.num_blocks
    contiguous = settings.contiguous
    lowest = 1 if settings.number("VLLM_PROMPT_QUERY_BUCKET_MIN", block) == 1 else block
    context = max(1, (length - (tokens if length >= LONG_CONTEXT else lowest)) // block)
    prompts = Ranges(
        exponential(1, 2, prefills, _doublings(prefills) + 1, contiguous),
        exponential(lowest, block, tokens, _doublings(tokens), contiguous),
        exponential(0, 1, context, 2 if context == 1 else _doublings(context) + 1, contiguous),
    )
    most = settings.blocks_per_request * requests
    if contiguous:
        most = min(most, blocks)
    elif not settings.hybrid_chunk:
        # shared blocks count once for each request, so that a step may read more blocks than the cache has
        most = min(most, 3 * blocks)
    count = _doublings(most) + 1
    if not contiguous and most > 3 * blocks:
        count += _doublings(most / (3 * blocks)) + 1
    decodes = Ranges(
        exponential(1, 2, requests, _doublings(requests) + 1, contiguous),
        [1],
        exponential(1, requests, most, count, contiguous),
    )
    return prompts, decodes


def _lin(settings: Settings) -> tuple[Ranges, Ranges]:
    length, block, blocks = settings.max_model_len, settings.block_size, settings.num_blocks
    query = _sizes(settings, "PROMPT_QUERY", block, block, settings.max_num_batched_tokens)
    prompts = Ranges(
        linear(*_sizes(settings, "PROMPT_BS", 1, 1, settings.prefill_batch)),
        linear(*query),
        linear(*_sizes(settings, "PROMPT_CTX", 0, 1, (length - query[0]) // block)),
    )
    most = blocks if settings.contiguous else max(length * settings.max_num_seqs // block, block)
    low, step, high = _sizes(settings, "DECODE_BLOCK", 1, block, most)
    high = min(high, blocks) if settings.contiguous else high
    low = max(1, high - step) if low > high else low
    batches = linear(*_sizes(settings, "DECODE_BS", 1, 32, settings.max_num_seqs))
    return prompts, Ranges(batches, [1], linear(low, step, high))


def _pad(settings: Settings) -> tuple[Ranges, Ranges]:
    length, block, blocks = settings.max_model_len, settings.block_size, settings.num_blocks
    tokens, requests = settings.max_num_batched_tokens, settings.max_num_seqs
    query = _sizes(settings, "PROMPT_QUERY", block, block, tokens)
    prompts = Ranges(
        _padded(settings, "PROMPT_BS", _sizes(settings, "PROMPT_BS", 1, 1, settings.prefill_batch)),
        _padded(settings, "PROMPT_QUERY", query, tokens),
        _padded(
            settings,
            "PROMPT_CTX",
            _sizes(settings, "PROMPT_CTX", 0, 2, math.ceil((length - query[0]) / block)),
            4 * math.ceil(tokens / block),
        ),
    )
    most = blocks if settings.contiguous else max(math.ceil(length * requests / block), block)
    low, step, high = _sizes(settings, "DECODE_BLOCK", block, block, most)
    high = min(high, blocks) if settings.contiguous else high
    low = max(1, blocks - step) if low > blocks else low
    batches = _padded(settings, "DECODE_BS", _sizes(settings, "DECODE_BS", 1, 2, requests), requests)
    return prompts, Ranges(batches, [1], _padded(settings, "DECODE_BLOCK", (low, step, high), most))


def _sizes(settings: Settings, name: str, low: int, step: int, high: int) -> tuple[int, int, int]:
    """Returns (first, step, last) of a dimension, by its variables or these defaults."""
    own = (("MIN", low), ("STEP", step), ("MAX", high))
    first, between, last = (settings.number(f"VLLM_{name}_BUCKET_{key}", value) for key, value in own)
    return first, between, last


def _padded(settings: Settings, name: str, sizes: tuple[int, int, int], four_pads: int | None = None) -> list[int]:
    """Returns the values of strategy pad. four_pads: four times the default of the padding; the last size if None."""
    most = math.ceil((settings.prefill_batch if four_pads is None else four_pads) / 4)
    most = settings.number(f"VLLM_{name}_BUCKET_PAD_MAX", most)
    return padding_aware(*sizes, most, settings.number(f"VLLM_{name}_BUCKET_PAD_PERCENT", 25))


def _doublings(size: float) -> int:
    return math.ceil(math.log2(size))


RANGES: dict[str, Callable[[Settings], tuple[Ranges, Ranges]]] = {"exp": _exp, "lin": _lin, "pad": _pad}
