"""Simulates a store of bounded size for logged requests: which tokens it loads, what it writes and evicts.

It follows the connector: requests load the longest stored beginning in full blocks, beyond what the device's own prefix
cache has, and never the last token of a prompt. Every other full block of prompt and answer is saved. The least
recently used block leaves first. Once a request ends, the blocks that were not on the device count as used from the
last to the first, so that of a prompt the end leaves first. Requests take no time: one that arrives while another
computes finds its blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from vllm_gaudi_ucm_tools.store.traffic_log import LoggedRequest, TrafficLog

_REPORT_REQUESTS = 64
_UNIT_BYTES = 8


@dataclass
class HitFigures:
    """Totals over a log, in tokens and in blocks.

    device_tokens: found in the device's cache. stored_tokens: loaded from the store. partial_tokens: what partial hits
    (`ucm.kv_cache.partial_hits`) would copy in addition, None if the log's units are larger than that. hits: requests
    that load something. peak_blocks: the most that the store held.
    """

    prompt_tokens: int = 0
    device_tokens: int = 0
    stored_tokens: int = 0
    partial_tokens: int | None = 0
    requests: int = 0
    hits: int = 0
    loaded_blocks: int = 0
    saved_blocks: int = 0
    evicted_blocks: int = 0
    peak_blocks: int = 0


@dataclass(frozen=True)
class ChainedRequest:
    """A request in blocks of one size. nodes: numbers of the full blocks of prompt and answer; equal numbers mean equal
    tokens from the first one on. findable: how many blocks of the prompt may be loaded. rest: bytes of the units
    after them, with which partial hits are compared.
    """

    tokens: int
    nodes: list[int]
    findable: int
    rest: bytes


@dataclass
class BlockChains:
    """The requests of a log in blocks of `block_size` tokens. Raises ValueError if the log's units do not fit these."""

    log: TrafficLog
    block_size: int
    _nodes: dict[tuple[int, bytes], int] = field(default_factory=dict)
    _contents_of: dict[int, bytes] = field(default_factory=dict)
    # blocks by the node before them (-1: none) and their first unit: others have nothing in common
    _children: dict[tuple[int, bytes], list[int]] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        unit = self.log.unit_tokens
        if self.block_size % unit and unit % self.block_size:
            raise ValueError(
                f"--block-size {self.block_size}: the trace has blocks of {unit} tokens; expected a multiple or a "
                "divisor of it"
            )

    @property
    def sees_inside(self) -> bool:
        """Returns whether the log says of two different blocks how far they agree."""
        return self.block_size > self.log.unit_tokens

    @cached_property
    def requests(self) -> list[ChainedRequest]:
        return [self._chained(request) for request in self.log.requests]

    def continuations(self, parent: int, units: bytes) -> list[int]:
        """Returns the blocks behind a node (-1: none) that begin with the same unit as `units`."""
        return self._children.get((parent, units[:_UNIT_BYTES]), [])

    def content(self, node: int) -> bytes:
        """Returns the units of a block; only if `sees_inside`."""
        return self._contents_of[node]

    def _chained(self, request: LoggedRequest) -> ChainedRequest:
        size = self.block_size
        known = request.prompt
        if request.answer is not None:
            known = np.concatenate((known, request.answer))
        # the last token is sampled, and never computed
        written = max(request.prompt_tokens, request.prompt_tokens + request.answer_tokens - 1)
        tokens = written if request.answer is not None else request.prompt_tokens
        nodes, parent = [], -1
        for content in self._contents(known, tokens // size):
            parent = self._node(parent, content)
            nodes.append(parent)
        for _ in range(written // size - len(nodes)):  # answers that the log does not show
            self._count += 1
            nodes.append(self._count)
        findable = (request.prompt_tokens - 1) // size
        rest = b""
        if self.sees_inside:
            units = slice(findable * size // self.log.unit_tokens, (request.prompt_tokens - 1) // self.log.unit_tokens)
            rest = request.prompt[units].tobytes()
        return ChainedRequest(request.prompt_tokens, nodes, findable, rest)

    def _contents(self, units: np.ndarray, count: int) -> Iterator[bytes]:
        """Yields what distinguishes each of the first `count` blocks."""
        unit = self.log.unit_tokens
        if self.block_size >= unit:
            each, raw = _UNIT_BYTES * (self.block_size // unit), np.ascontiguousarray(units).tobytes()
            for block in range(count):
                yield raw[block * each : (block + 1) * each]
        else:
            parts = unit // self.block_size
            for block in range(count):
                yield b"%d.%d" % (units[block // parts], block % parts)

    def _node(self, parent: int, content: bytes) -> int:
        """Returns the number of a block behind another; ids that are not chained become so."""
        node = self._nodes.get((parent, content))
        if node is None:
            self._count += 1
            node = self._nodes[parent, content] = self._count
            if self.sees_inside:
                self._contents_of[node] = content
                self._children.setdefault((parent, content[:_UNIT_BYTES]), []).append(node)
        return node


class LruBlocks:
    """Numbers of blocks, `most` at most (None: no bound); the least recently used leave first."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.evicted = 0

    def __contains__(self, node: int) -> bool:
        return node in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def use(self, node: int) -> bool:
        """Makes a block the newest; True if it was not there."""
        if node in self._blocks:
            self._blocks.move_to_end(node)
            return False
        if self._most == 0:
            return False
        self._blocks[node] = None
        if self._most is not None and len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
            self.evicted += 1
        return True


def simulate(
    chains: BlockChains,
    store_blocks: int | None,
    device_blocks: int = 0,
    report: Callable[[float], None] = lambda done: None,
) -> HitFigures:
    """Returns the figures of a store and a device's prefix cache with room for so many blocks; None: without bound."""
    store, device = LruBlocks(store_blocks), LruBlocks(device_blocks)
    figures = HitFigures(partial_tokens=0 if chains.sees_inside else None)
    for number, request in enumerate(chains.requests):
        on_device = _run(device, request.nodes[: request.findable])
        found = on_device + _run(store, request.nodes[on_device : request.findable])
        figures.requests += 1
        figures.hits += found > on_device
        figures.prompt_tokens += request.tokens
        figures.device_tokens += on_device * chains.block_size
        figures.stored_tokens += (found - on_device) * chains.block_size
        figures.loaded_blocks += found - on_device
        if figures.partial_tokens is not None:
            figures.partial_tokens += _partial_tokens(chains, request, found, device)
        for node in request.nodes[on_device:]:
            figures.saved_blocks += store.use(node)
        for node in reversed(request.nodes[on_device:]):
            if node in store:
                store.use(node)
        for node in reversed(request.nodes):  # vLLM frees the last block first
            device.use(node)
        figures.peak_blocks = max(figures.peak_blocks, len(store))
        if number % _REPORT_REQUESTS == 0:
            report(number / len(chains.log.requests))
    figures.evicted_blocks = store.evicted
    report(1.0)
    return figures


def _run(blocks: LruBlocks, nodes: list[int]) -> int:
    """Returns how many of the first blocks are there."""
    for count, node in enumerate(nodes):
        if node not in blocks:
            return count
    return len(nodes)


def _partial_tokens(chains: BlockChains, request: ChainedRequest, found: int, device: LruBlocks) -> int:
    """Returns how many tokens the device's cache has of the block after the `found` ones."""
    parent = request.nodes[found - 1] if found else -1
    wanted = chains.content(request.nodes[found]) if found < request.findable else request.rest
    held = [chains.content(node) for node in chains.continuations(parent, wanted) if node in device]
    return max((_common_units(wanted, content) for content in held), default=0) * chains.log.unit_tokens


def _common_units(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other)) // _UNIT_BYTES
    differ = np.frombuffer(one, np.int64, length) != np.frombuffer(other, np.int64, length)
    return int(differ.argmax()) if differ.any() else length
