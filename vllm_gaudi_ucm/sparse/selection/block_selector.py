"""Block selection on the device: summaries for the KV cache's blocks, and each layer's choice for the step."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from vllm_gaudi_ucm.observability.room_metrics import DeviceCounts
from vllm_gaudi_ucm.ops.block_selection.api import chosen_implementation, new_summaries
from vllm_gaudi_ucm.ops.block_selection.features import SummaryKind
from vllm_gaudi_ucm.sparse.selection.block_scorer import BlockScorer, OverRanks, ScoredLayer
from vllm_gaudi_ucm.sparse.selection.layer_selector import (
    ChoosingLayer,
    DenseLayer,
    FollowingLayer,
    LayerSelection,
    LayerSelector,
    Scoring,
)
from vllm_gaudi_ucm.sparse.selection.selection_limits import SelectionLimits
from vllm_gaudi_ucm.sparse.selection.selection_tensors import SelectionTensors

F = TypeVar("F", bound=Callable[..., object])


class Region(Protocol):
    """Compiles a function."""

    def __call__(self, function: F, /) -> F: ...


class SelectionLayer(NamedTuple):
    """An attention layer. keys: its view [blocks, block size, kv heads, key size] of the KV cache."""

    keys: torch.Tensor
    scale: float


class KeptQueries(NamedTuple):
    """Options for keeping queries of each step, with which all blocks of a request are scored, with KV offload.

    num_rows: number of blocks that can have a copy off the device. heads, dtype: of queries. over_ranks: the mean over
    the ranks if there are several, however each rank makes its choices: a block leaves all of them.
    """

    num_rows: int
    heads: int
    dtype: torch.dtype
    over_ranks: OverRanks | None = None


class ChoosingLayers(NamedTuple):
    """The layers that choose.

    reuse: number of consecutive layers that share a choice; the first of them makes it. dense: layers that attend to
    whole contexts. first: number in the model of the first layer here, if earlier pipeline stages have other layers.
    numbers: numbers of all layers here, if the model has others in between; None: they are consecutive.
    """

    reuse: int = 1
    dense: Sequence[int] = ()
    first: int = 0
    numbers: Sequence[int] | None = None


class BlockSelector:
    """Tensors of all layers. No method of a step reads the device from the host, so steps run inside captured graphs.

    Args:
        layers: this worker's layers, in the model's order; none on a pipeline stage that has only windows.
        choosing: which of the layers choose.
        scoring: how they score and rank blocks.
        kept: queries to keep of each step; None: none.
        narrow: summaries are 8-bit floats, whatever the dtype of the keys.
        device: device of the KV cache; None: that of the first layer's keys.
    """

    def __init__(
        self,
        layers: Sequence[SelectionLayer],
        kind: SummaryKind,
        limits: SelectionLimits,
        choosing: ChoosingLayers | None = None,
        scoring: Scoring | None = None,
        kept: KeptQueries | None = None,
        *,
        narrow: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._kind = kind
        device = device or layers[0].keys.device
        scoring, (reuse, dense, first, numbers) = scoring or Scoring(), choosing or ChoosingLayers()
        self.implementation = chosen_implementation(device.type, scoring.implementation)
        """The implementation of block selection, with `auto` resolved."""
        self._limits = limits
        self._numbers = range(first, first + len(layers)) if numbers is None else numbers
        self.leaders = layer_leaders(len(layers), reuse, dense, first)
        self._keys = [layer.keys for layer in layers]
        self._summaries = [new_summaries(layer.keys, kind, narrow=narrow) for layer in layers]
        self.scorer = None if kept is None else self._scorer(layers, kept)
        """Keeps the queries of each step; None without KV offload."""
        self.checks = torch.zeros(2, dtype=torch.int64, device=device)
        self.recall = torch.zeros(2, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        self.layers = [self._make_layer(index, layer, scoring) for index, layer in enumerate(layers)]
        """Each is held by the attention of its layer."""
        self._choosing = [layer for layer in self.layers if isinstance(layer, ChoosingLayer)]
        self._chooses_at_once = all(layer.chooses_at_once for layer in self._choosing)
        self._read: Callable[[list[torch.Tensor], torch.Tensor], list[torch.Tensor]] = _read_rows
        self._measure: Callable[[torch.Tensor, torch.Tensor, SelectionTensors, torch.Tensor], None] = _add_recall

    def _make_layer(self, index: int, layer: SelectionLayer, scoring: Scoring) -> LayerSelector:
        leader, summaries = self.leaders[index], self._summaries[index]
        if leader is None:
            return DenseLayer(summaries, self._kind)
        if leader != index:
            return FollowingLayer(summaries, self._kind)
        # One slot more than there are requests, in which pads store. A tensor for each layer: graphs write it, and
        # slices of one tensor would not be written in place on a Gaudi.
        shape = (self._limits.max_num_seqs + 1, self._limits.most)
        stored = torch.full(shape, -1, dtype=torch.int64, device=layer.keys.device)
        queries = None if self.scorer is None else self.scorer.queries_of(index)
        measured = index == max(leader for leader in self.leaders if leader is not None)
        return ChoosingLayer(
            ScoredLayer(self._numbers[index], summaries, layer.scale),
            self._kind,
            stored,
            self.checks,
            scoring._replace(implementation=self.implementation),
            queries=queries,
            recall=self.recall if measured else None,
        )

    def _scorer(self, layers: Sequence[SelectionLayer], kept: KeptQueries) -> BlockScorer:
        chosen = sorted({leader for leader in self.leaders if leader is not None})
        scored = [ScoredLayer(index, self._summaries[index], layers[index].scale) for index in chosen]
        slots, width = self._limits.max_num_seqs + 1, self._limits.width
        shape = kept.heads, layers[0].keys.shape[-1]
        return BlockScorer(
            scored, self._kind, slots, kept.num_rows, width, shape, query_dtype=kept.dtype, over_ranks=kept.over_ranks
        )

    @property
    def is_native_calls(self) -> bool:
        """Returns whether a step's choices, made by native kernels, are only calls of these."""
        if not self._chooses_at_once or self.scorer is not None or None in self.leaders:
            return False
        if self.implementation != "native":
            return False
        from vllm_gaudi_ucm.ops.block_selection.impl.cpu.native import covers

        return all(covers(summaries, self._kind) for summaries in self._summaries)

    def counts(self) -> DeviceCounts:
        """Reads the counts from the device: not to be called while graphs are captured, nor in every step."""
        return DeviceCounts(*self.checks.tolist(), *self.recall.tolist())

    def summarise(self, blocks: torch.Tensor) -> None:
        """Writes the summaries of blocks (int64 [n]) in all layers, after a step without choices."""
        for layer, keys in zip(self.layers, self._keys, strict=True):
            layer.summarise(keys, blocks)

    @property
    def summaries(self) -> list[torch.Tensor]:
        """The summaries of each layer, [blocks, vectors, kv heads, width] by physical block."""
        return self._summaries

    @property
    def bytes(self) -> int:
        """Returns the bytes of summaries and stored choices."""
        kept = 0 if self.scorer is None else self.scorer.bytes
        stored = (layer.stored for layer in self._choosing)
        return kept + sum(tensor.nbytes for tensor in (*self._summaries, *stored))

    def refill(self) -> None:
        """Resets every tensor to its initial state, after a warm-up that computed nothing; no request has a choice."""
        for tensor in (*self._summaries, self.checks, self.recall):
            tensor.zero_()
        for layer in self._choosing:
            layer.stored.fill_(-1)
            layer.take_stored(layer.stored[:0])
        if self.scorer is not None:
            self.scorer.refill()

    def compile(self, region: Region) -> None:
        """Also compiles the code that runs before and after the layers from now on."""
        self._read, self._measure = region(_read_rows), region(_add_recall)

    def begin(self, selection: LayerSelection) -> None:
        """Gives the layers the stored rankings of the step's requests before the layers run."""
        if selection.native is not None and self._chooses_at_once:
            return
        if not selection.reused and all(layer.hands_over for layer in self._choosing):
            return
        rows = self._read([layer.stored for layer in self._choosing], selection.tensors.choice_slots)
        for layer, before in zip(self._choosing, rows, strict=True):
            layer.take_stored(before)

    def end(self, selection: LayerSelection) -> None:
        """Adds to `recall` after the layers have run, from the last layer that has scored. One layer, to be cheap."""
        if selection.scores is not None and selection.ranking is not None:
            self._measure(selection.scores, selection.ranking, selection.tensors, self.recall)


def _read_rows(tables: list[torch.Tensor], rows: torch.Tensor) -> list[torch.Tensor]:
    return [table.index_select(0, rows) for table in tables]


def _add_recall(scores: torch.Tensor, ranking: torch.Tensor, t: SelectionTensors, recall: torch.Tensor) -> None:
    """Adds the estimated attention mass of chosen candidates, and of all candidates."""
    mass = scores.new_zeros(t.num_spans * t.width + 1).index_copy_(0, t.candidate_places, scores)
    # the place of pads; assigning a number would copy it from the host, which no graph captures
    mass[-1:].zero_()
    numbers = ranking.view(-1).index_select(0, t.choice_places).clamp_min(0)
    chosen = mass.index_select(0, t.choice_spans * t.width + numbers) * (t.choice_hi > 0)
    recall += torch.stack((chosen.sum(), mass.sum())).to(recall.dtype)


def layer_leaders(
    num_layers: int, reuse_layers: int, dense_layers: Sequence[int], first_layer: int = 0
) -> list[int | None]:
    """Returns for each layer of this worker the layer that chooses for it, None for dense layers. `dense_layers` and
    the groups of `reuse_layers` are counted in the model; if stages share a group, each stage chooses for its own
    layers.
    """
    leaders: list[int | None] = []
    for layer in range(first_layer, first_layer + num_layers):
        first = max(first_layer, layer - layer % reuse_layers)
        group = [member for member in range(first, layer + 1) if member not in dense_layers]
        leaders.append(None if layer in dense_layers else group[0] - first_layer)
    return leaders
