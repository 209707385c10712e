"""What a rank of one pipeline stage holds: layers, micro-batches in flight, ends, and the parameters that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trimaran.cost.grid import Bools, Floats, Ints, LayoutGrid, padded_vocab_of
from trimaran.nouns.model import LayerKind, Model, padded_vocab
from trimaran.nouns.stack import Stack


@dataclass(frozen=True)
class StageLayers:
    """Layers and ends that a rank of one stage holds.

    Layers that predict further tokens are among those of the stage of the head. So many of the layers as are `dense`
    have an MLP where the model's others have a mixture of experts.
    """

    layers: Floats
    embedding: Bools
    head: Bools
    dense: Floats | float = 0.0

    def at_work(self, grid: LayoutGrid, stage: Floats) -> StageShape:
        """The same of ranks of `stage` (0 the first) at the peak of an iteration."""
        flying, waiting = in_flight(grid, stage), put_off(grid, stage)
        return StageShape(self.layers, self.embedding, self.head, self.dense, in_flight=flying, put_off=waiting)


@dataclass(frozen=True, kw_only=True)
class StageShape(StageLayers):
    """What a rank of one stage holds at its peak: micro-batches in flight besides, in units of whole stages.

    Of these `put_off` are those whose weights' gradients are not made yet, and the factors of these stay.
    """

    in_flight: Floats
    put_off: Floats | float = 0.0


def end_layers(model: Model, grid: LayoutGrid) -> tuple[StageLayers, StageLayers, StageLayers]:
    """The first rank of a pipeline, one of those between with most layers, and the last, of every layout.

    Folded, the first one has both ends. Layers that predict further tokens are on the rank of the head.
    """
    both_ends, single = (grid.pp == 1) | grid.folded, grid.pp == 1
    no, head_is_last = np.zeros(len(grid), dtype=bool), ~grid.folded | single
    layers = grid.splits.first, grid.splits.middle, grid.splits.last
    counts = [ranks[grid.split_row].astype(np.float64) for ranks in layers]
    dense: Sequence[Floats | float] = (0.0, 0.0, 0.0)
    if model.dense_layers:
        dense = [ranks[grid.split_row].astype(np.float64) for ranks in grid.splits.first_layers(model.dense_layers)]
    elif model.experts_every > 1:
        dense = [_dense_between(model, count) for count in counts]
    counts[0] = counts[0] + model.mtp_depth * both_ends
    counts[2] = counts[2] + model.mtp_depth * head_is_last
    return (
        StageLayers(counts[0], ~no, both_ends, dense[0]),
        StageLayers(counts[1], no, no, dense[1]),
        StageLayers(counts[2], single, head_is_last, dense[2]),
    )


def end_shapes(model: Model, grid: LayoutGrid) -> tuple[StageShape, StageShape, StageShape]:
    """The same at the peak of an iteration; of the ranks between with most layers the fullest."""
    last = np.maximum(grid.pp - 1, 0).astype(np.float64)
    down, up = grid.splits.fullest_between(model.dense_layers)
    middle = np.where(grid.chose("schedule", "zero_bubble"), up[grid.split_row, 0], down[grid.split_row, 0])
    of_first, of_middle, of_last = end_layers(model, grid)
    return (
        of_first.at_work(grid, np.zeros(len(grid))),
        of_middle.at_work(grid, np.minimum(last, middle)),
        of_last.at_work(grid, last),
    )


def further_ranks(model: Model, grid: LayoutGrid) -> Iterator[tuple[Ints, Ints]]:
    """Ranks that may hold more than the `end_shapes`, by turns: rows of the grid, and a rank of each.

    One with fewer layers has more micro-batches in flight where it is further up, and puts off more under a
    zero-bubble schedule where it is further down. Folded it may be either, or, of a few micro-batches, one far enough
    down to have all of them in flight on the way up, or no longer all on the way down.
    """
    down, up = (ranks[grid.split_row] for ranks in grid.splits.fullest_between(model.dense_layers))
    several, puts_off = grid.pp > 2, grid.chose("schedule", "zero_bubble")
    looked_at = np.where(puts_off, up[:, 0], down[:, 0])
    turns = [(rank, several & (rank != looked_at)) for rank in down.T]
    turns += [(rank, several & puts_off & (rank != looked_at)) for rank in up.T[1:]]
    if grid.folded.any():
        m = grid.micro_batches
        turning = [np.clip(rank, 1, up[:, 0]) for rank in (m, 2 * grid.pp - m)]
        turns += [(rank, several & grid.folded) for rank in (*up.T, *turning)]
    for rank, asked in turns:
        rows = np.flatnonzero(asked)
        if len(rows):
            yield rows, rank[rows]


def shape_between(model: Model, grid: LayoutGrid, rank: Ints) -> StageShape:
    """A rank between the first and the last, of every layout."""
    no, at = np.zeros(len(grid), dtype=bool), rank.astype(np.float64)
    layers = grid.splits.of_rank(grid.split_row, rank)
    dense: Floats | float = 0.0
    if model.dense_layers:
        dense = grid.splits.first_of_rank(grid.split_row, rank, model.dense_layers)
    elif model.experts_every > 1:
        dense = _dense_between(model, layers)
    return StageLayers(layers, no, no, dense).at_work(grid, at)


def dense_of_stages(model: Model, grid: LayoutGrid) -> Floats:
    """Layers without experts of each rank of a pipeline, (layouts, ranks), of a model that has both kinds."""
    if model.experts_every > 1:
        return _dense_between(model, grid.splits.layers(grid.split_row).sum(axis=1) * 1.0)
    return np.asarray(grid.splits.first_in_stages(grid.split_row, model.dense_layers).sum(axis=1) * 1.0)


def _dense_between(model: Model, layers: Floats) -> Floats:
    """Of a rank's layers those without experts where these come in turns; what is left of a turn may have them."""
    return np.asarray(layers - np.ceil(layers / model.experts_every))


def in_flight(grid: LayoutGrid, stage: Floats) -> Floats:
    """Micro-batches whose activations a rank of `stage` (0 the first) keeps at the peak.

    1F1B: p - stage; zero-bubble (ZB-H1): besides, of as many as are missing from p the products of the weights'
    gradients are put off, whose factors stay (Qi et al., arXiv 2401.10241, section 2.3; tests/train/test_dry_run.py
    lays them beside a trace); GPipe: all; interleaved: 2 (p - stage - 1) + (v - 1) p + 1 chunks of 1/v of its layers
    (Narayanan et al., arXiv 2104.04473, section 2.2).
    """
    m, p, v = grid.micro_batches.astype(np.float64), grid.pp, grid.vpp
    one_f_one_b = np.minimum(p - stage, m) + put_off(grid, stage)
    flying = np.where(grid.chose("schedule", "gpipe"), m, one_f_one_b)
    interleaved = np.flatnonzero(grid.chose("schedule", "interleaved"))
    if len(interleaved):
        # one more where a forward runs beside another micro-batch's backward (Megatron-Core 0.15, schedules.py:730)
        beside = grid.chose("ep_overlap", "batch")
        chunks = np.minimum(2.0 * (p - stage - 1) + (v - 1.0) * p + 1.0 + beside, m * v)
        flying[interleaved] = _whole_stages(grid, interleaved, stage[interleaved], chunks[interleaved])
    if grid.folded.any():
        flying = np.where(grid.folded, _folded_in_flight(grid, stage), flying)
    return np.where(p > 1, flying, 1.0)


def put_off(grid: LayoutGrid, stage: Floats) -> Floats:
    """Micro-batches whose weights' gradients a rank of `stage` has not made at the peak: zero-bubble's."""
    puts_off = grid.chose("schedule", "zero_bubble")
    if not puts_off.any():
        return np.zeros(len(grid))
    m, p = grid.micro_batches.astype(np.float64), grid.pp
    return np.where(puts_off, np.minimum(p, m) - np.minimum(p - stage, m), 0.0)


def _whole_stages(grid: LayoutGrid, rows: Ints, rank: Floats, turns: Floats) -> Floats:
    """What a rank of interleaved pipelines, the grid's at `rows`, keeps at its peak, over what one micro-batch takes.

    Turns go by p micro-batches through its chunks, forwards from the first on, backwards from the last on, after so
    many `turns` of warm-up one of each. Where its chunks are alike the warm-up is the peak. Where they are not, as
    beside an embedding or a head, forwards of a fuller chunk meet backwards of another, and what is kept rises on until
    either comes to its next chunk; a round of all chunks later that recurs. Chunks between a rank's first and its last
    count as their mean.
    """
    p, split_row = grid.pp[rows] * 1.0, grid.split_row[rows]
    v, m = grid.vpp[rows], grid.micro_batches[rows]
    first, last = grid.splits.chunks(split_row, rank)
    layers = grid.splits.of_rank(split_row, rank)
    around = v * p
    # where there are no chunks between the ends' these two hold all layers
    between = np.where(v > 2, (layers - first - last) / np.maximum(v - 2.0, 1.0), last)

    def in_rounds(done: Floats) -> tuple[Floats, Floats]:
        """Whole rounds of so many turns, and the turns beyond: NumPy's % takes ten times as long."""
        rounds = np.floor(done / around)
        return rounds, done - rounds * around

    def begun(done: Floats) -> Floats:
        """Turns of so many that are of the chunk that comes first."""
        rounds, beyond = in_rounds(done)
        return np.asarray(rounds * p + np.minimum(beyond, p))

    def ended(done: Floats) -> Floats:
        """Turns of so many that are of the chunk that comes last."""
        rounds, beyond = in_rounds(done)
        return np.asarray(rounds * p + np.maximum(beyond - (around - p), 0.0))

    most = np.zeros(len(rows))
    steady = np.maximum(m * v - turns, 0.0)
    ends = (0.0 * p, p, around - p)
    for backwards in (*ends, *(in_rounds(end - turns)[1] for end in ends)):
        done = np.minimum(backwards, steady)
        of_first, of_last = begun(turns + done) - ended(done), ended(turns + done) - begun(done)
        most = np.maximum(most, turns * between + of_first * (first - between) + of_last * (last - between))
    weighed = most / np.maximum(layers, 1.0)
    # fewer micro-batches than ranks take no turns by p
    return np.asarray(np.where((layers > 0) & (m >= p), weighed, turns / v))


def _folded_in_flight(grid: LayoutGrid, rank: Floats) -> Floats:
    """Micro-batches in flight of the two chunks, weighed by their layers.

    A micro-batch is kept until its weight gradients are made, for which its activations are needed. Of rank r those are
    2 p - r of the first chunk and r of the second, or one less and one more (ZB-V), and r + 1 beside 2 p - r where a
    forward runs beside a backward (DualPipeV): the peak of the orders in trimaran.layout.schedule.
    """
    m, p = grid.micro_batches.astype(np.float64), grid.pp
    down, up = grid.splits.chunks(grid.split_row, rank)
    before, after = np.minimum(2.0 * p - rank, m), np.minimum(2.0 * p - 1.0 - rank, m)
    fewer, more = np.minimum(rank, m), np.minimum(rank + 1.0, m)
    kept = np.maximum(before * down + fewer * up, after * down + more * up)
    kept = np.where(grid.chose("schedule", "dualpipev"), before * down + more * up, kept)
    return np.asarray(kept / np.maximum(down + up, 1.0))


def parameters(model: Model, stack: Stack, grid: LayoutGrid, shape: StageLayers) -> Floats:
    """Parameters on a rank of the stage, before ZeRO shards them."""
    t = grid.tp
    vocabulary = padded_vocab_of(model, stack, t) * model.hidden / t
    fixed = model.embedding_parameters() - padded_vocab(model.vocab, 1) * model.hidden
    head_here = shape.head & (model.head == "vocabulary")
    if model.tied_embedding:
        # A tied head is the embedding itself where both sit on one stage, and a copy of it elsewhere.
        head_here = head_here & ~shape.embedding & stack.tied_embedding_replicated
    ends = np.where(shape.embedding, vocabulary + fixed, 0.0) + np.where(head_here, vocabulary, 0.0)
    if model.mtp_depth:
        # further tokens are embedded where they are predicted: a tied head has that matrix already
        again = 0.0 if model.tied_embedding else np.where(shape.head & ~shape.embedding, vocabulary, 0.0)
        ends = ends + again + np.where(shape.head, model.mtp_depth * model.joining_parameters / t, 0.0)
    norm = np.where(shape.head, float(model.norm_parameters), 0.0)
    return np.asarray(stage_layer_parameters(model, grid, shape) + ends + norm)


def stage_layer_parameters(model: Model, grid: LayoutGrid, shape: StageLayers) -> Floats:
    """Parameters of all layers on a rank of the stage."""
    if not model.experts and model.latent_attention is None:
        return shape.layers * rank_layer_parameters(model, grid, "dense")
    of_main = layer_parameters(model, grid)
    return shape.layers * of_main + shape.dense * (rank_layer_parameters(model, grid, "dense") - of_main)


def layer_parameters(model: Model, grid: LayoutGrid) -> Floats:
    """Parameters of a layer of most layers' kind on a rank, experts among them."""
    if not model.experts:
        return rank_layer_parameters(model, grid, "dense")
    return rank_layer_parameters(model, grid, "experts") + rank_expert_parameters(model, grid)


def rank_layer_parameters(model: Model, grid: LayoutGrid, kind: LayerKind) -> Floats:
    """Parameters of one layer of a kind on a rank, its routed experts apart."""
    if kind == "dense":
        uncut, whole = model.uncut_attention_parameters, model.layer_parameters
    else:
        uncut, whole = model.uncut_parameters, model.mixture_layer_parameters - model.expert_parameters
    cut: Floats = (whole - uncut) / grid.tp
    return uncut + cut + _repeated_keys(model, grid)


def _repeated_keys(model: Model, grid: LayoutGrid) -> Floats | float:
    """Parameters of one layer's keys and values that a rank has beyond its share: ranks have whole heads of them."""
    if model.latent_attention is not None or not (model.kv_heads % grid.tp).any():
        return 0.0
    beyond = np.ceil(model.kv_heads / grid.tp) - model.kv_heads / grid.tp
    return np.asarray(2.0 * model.hidden * model.head_dim * beyond)


def rank_expert_parameters(model: Model, grid: LayoutGrid) -> Floats:
    """Parameters of one layer's routed experts on a rank."""
    return np.asarray(model.expert_parameters / grid.fold("ep", "etp"))


def expert_parameters(model: Model, grid: LayoutGrid, shape: StageLayers) -> Floats:
    """Parameters of routed experts on a rank of the stage, before ZeRO shards them."""
    return (shape.layers - shape.dense) * rank_expert_parameters(model, grid)


def fullest_parameters(model: Model, stack: Stack, grid: LayoutGrid) -> tuple[Floats, Floats | None]:
    """Parameters on the rank that has most of them, and those of them that are routed experts'; None: it has none."""
    shapes = end_layers(model, grid)
    each = [parameters(model, stack, grid, shape) for shape in shapes]
    if not model.experts:
        return np.maximum(np.maximum(each[0], each[1]), each[2]), None
    fullest = np.argmax(each, axis=0)
    experts = [expert_parameters(model, grid, shape) for shape in shapes]
    return np.choose(fullest, each), np.choose(fullest, experts)
